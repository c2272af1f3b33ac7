"""Local attention that goes on where it stopped: decoding, prompts in pieces, rows that differ.

The state is a ring: position p of a row lives in slot p mod window. Softmax does not care about the
order of its keys, so a step of one token writes one slot and reads the ring as it lies.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vort.ops.custom import without_autocast
from vort.ops.gpu.launcher import kernels_take, transformed
from vort.ops.padding import check_lengths, keep_last, may_look

from .attention import attend, check_numbers, local_attention, silence
from .block import MASKED, working_dtype
from .checks import WIDEST, check_heads, check_padding_mask, check_window
from .rope import apply_rope

__all__ = ["LocalState", "attend_locally"]


class LocalState(NamedTuple):
    """The last `window` keys (turned by RoPE where it is used) and values of every row.

    Attributes:
        k: `[B, window, Hkv, D]`; position p is in slot p mod window, slots not yet written are 0.
        v: `[B, window, Hkv, V]`, likewise.
        seen: `[B]` int64, real positions each row has seen so far (a tensor, so that a compiled
            step need not be compiled again for every position).
    """

    k: Tensor
    v: Tensor
    seen: Tensor

    @classmethod
    def empty(cls, k: Tensor, v: Tensor, window: int) -> "LocalState":
        """The state before the first of `k` and `v` `[B, T, Hkv, ·]`.

        >>> LocalState.empty(torch.zeros(2, 0, 4, 64), torch.zeros(2, 0, 4, 32), 16).v.shape
        torch.Size([2, 16, 4, 32])
        """
        check_window(window)
        shape = (k.shape[0], window, k.shape[2])
        return cls(
            k.new_zeros(*shape, k.shape[3]),
            v.new_zeros(*shape, v.shape[3]),
            torch.zeros(k.shape[0], dtype=torch.int64, device=k.device),
        )

    @property
    def window(self) -> int:
        """The number of positions that the ring holds."""
        return self.k.shape[1]

    @property
    def written(self) -> Tensor:
        """`[B, window]`: whether a slot holds a position."""
        return torch.arange(self.window, device=self.k.device) < self.seen[:, None]


def attend_locally(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    *,
    scale: float | None = None,
    rope_base: float | None = None,
    state: LocalState | None = None,
    real: Tensor | None = None,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_entropy: bool = False,
    output_state: bool = False,
    in_place: bool = False,
) -> tuple[Tensor, Tensor | None, LocalState | None]:
    """Output `[B, T, H, V]`, entropy `[B, T, H]` and state of attention within a window.

    q `[B, T, H, D]`, k and v `[B, T, Hkv, ·]`; real `[B, T]` and lengths `[B]` say which positions
    at the front of each row are tokens, either of them alone both. cu_seqlens packs sequences where
    no state comes or goes.
    With `state` the sequences go on where that one ended, in pieces of any length; it is left as
    it is, so a search may branch from it, unless `in_place`: then a single token without gradients
    or padding moves it on where kernels can. Other arguments as in `local_attention`.

    >>> q, k, v = torch.randn(3, 2, 9, 1, 4)
    >>> whole, _, _ = attend_locally(q, k, v, 3)
    >>> _, _, state = attend_locally(q[:, :5], k[:, :5], v[:, :5], 3, output_state=True)
    >>> rest, _, _ = attend_locally(q[:, 5:], k[:, 5:], v[:, 5:], 3, state=state)
    >>> torch.allclose(rest, whole[:, 5:], atol=1e-6)
    True
    """
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if cu_seqlens is not None and (state is not None or output_state):
        raise ValueError(
            "cu_seqlens must be None with a state or output_state: a state is of one sequence a row"
        )
    check_padding_mask(real, q.shape[:2], "real")
    if lengths is not None:
        check_lengths(lengths, *q.shape[:2])
        if real is None:
            real = torch.arange(q.shape[1], device=q.device) < lengths[:, None]
        elif real.device.type == "cpu" and may_look(real) and not transformed():
            _check_agreement(real, lengths)
    if state is None and not output_state:
        o, entropy = local_attention(
            q,
            k,
            v,
            window,
            scale=scale,
            rope_base=rope_base,
            padding_mask=real,
            cu_seqlens=cu_seqlens,
            return_entropy=return_entropy,
        )
        return o, entropy, None
    check_heads(q, k, v)
    check_numbers(q, k, v, real)
    if state is None and real is None and not torch.compiler.is_compiling():
        options = {"scale": scale, "rope_base": rope_base, "return_entropy": return_entropy}
        o, entropy = local_attention(q, k, v, window, **options)  # type: ignore[arg-type]
        if rope_base is not None:
            k = apply_rope(k, torch.arange(k.shape[1], device=k.device), rope_base)
        return o, entropy, _first(k, v, window)
    past = LocalState.empty(k, v, window) if state is None else state
    _check_state(past, k, v, window)
    if rope_base is not None:
        position = past.seen[:, None] + torch.arange(q.shape[1], device=q.device)
        q, k = apply_rope(q, position, rope_base), apply_rope(k, position, rope_base)
    if in_place and state is not None and q.shape[1] == 1 and _steps(q, k, v, state, real):
        from .triton.step import attend_step

        o, entropy = attend_step(q, k, v, *state, scale)
        return o, entropy if return_entropy else None, state
    if real is not None:
        q, k, v = (silence(x, real) for x in (q, k, v))
        lengths = real.sum(1) if lengths is None else lengths
    if state is not None and q.shape[1] == 1:
        after = _write(state, k, v, real)
        o, entropy = _attend_row(q[:, 0], after, scale, return_entropy)
    else:
        keys, values = (_turn(x, past.seen) for x in past[:2])
        seen = past.seen + (q.shape[1] if lengths is None else lengths)
        kept_k, kept_v = keep_last(keys, k, lengths), keep_last(values, v, lengths)
        after = LocalState(_turn(kept_k, -seen), _turn(kept_v, -seen), seen)
        if state is None or q.shape[1] == 0:  # no mask is needed for what is not there
            o, entropy = local_attention(
                q, k, v, window, scale=scale, padding_mask=real, return_entropy=return_entropy
            )
            return o, entropy, after
        written = _turn(past.written, past.seen)
        here = written.new_ones(q.shape[:2]) if real is None else real
        o, entropy = attend(
            q,
            torch.cat([keys, k.to(keys.dtype)], 1)[:, 1:],
            torch.cat([values, v.to(values.dtype)], 1)[:, 1:],
            window,
            scale=scale,
            valid=torch.cat([written, here], 1)[:, 1:],
            return_entropy=return_entropy,
        )
    o = o.to(v.dtype)
    if real is not None:
        o = silence(o, real)
        entropy = None if entropy is None else entropy.masked_fill(~real[..., None], 0)
    return o, entropy if return_entropy else None, after


def _first(k: Tensor, v: Tensor, window: int) -> LocalState:
    """The state after whole rows from their beginning: how far to turn is known on the host."""
    batch, length = k.shape[:2]

    def ring(x: Tensor) -> Tensor:
        if length < window:
            return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, window - length))
        return x[:, length - window :].roll(length % window, 1)

    seen = torch.full((batch,), length, dtype=torch.int64, device=k.device)
    return LocalState(ring(k), ring(v), seen)


def _steps(q: Tensor, k: Tensor, v: Tensor, state: LocalState, real: Tensor | None) -> bool:
    """Whether the kernel of one token can do it."""
    dense = state.k.is_contiguous() and state.v.is_contiguous()
    fits = max(q.shape[-1], v.shape[-1]) <= WIDEST and real is None and not torch.is_grad_enabled()
    return fits and dense and kernels_take(q, k, v, state.k, state.v)


def _turn(x: Tensor, by: Tensor) -> Tensor:
    """`[B, window, ...]` with slot s of row b holding what was in slot (s + by[b]) mod window.

    By `seen` a ring comes in order, the latest position last; by `-seen` it is a ring again.
    """
    window = x.shape[1]
    slots = (torch.arange(window, device=x.device) + by[:, None]) % window
    return x.gather(1, slots.reshape(*slots.shape, *[1] * (x.ndim - 2)).expand_as(x))


def _write(state: LocalState, k: Tensor, v: Tensor, real: Tensor | None) -> LocalState:
    """The state after one more token `[B, 1, Hkv, ·]` in every row where there is one."""
    slot = state.seen % state.window
    if real is None and k.device.type == "cpu":
        # One copy with a row put in takes a CPU a fraction of a choice at every element.
        index = slot[:, None, None, None]
        keys, values = (
            ring.scatter(1, index.expand_as(x), x.to(ring.dtype))
            for ring, x in ((state.k, k), (state.v, v))
        )
        return LocalState(keys, values, state.seen + 1)
    here = torch.arange(state.window, device=k.device) == slot[:, None]
    if real is not None:
        here = here & real
    at = here[..., None, None]
    keys = torch.where(at, k.to(state.k.dtype), state.k)
    values = torch.where(at, v.to(state.v.dtype), state.v)
    return LocalState(keys, values, state.seen + (1 if real is None else real[:, 0]))


def _attend_row(
    q: Tensor, state: LocalState, scale: float, return_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Attention of `[B, H, D]` to all that a state holds: `[B, 1, H, V]`, `[B, 1, H]`."""
    k, v, _ = state
    dtype = working_dtype(q, k, v)
    with without_autocast(q):
        q = q.to(dtype).unflatten(1, (k.shape[2], -1))
        scores = torch.einsum("bgrd,bjgd->bgrj", q, k.to(dtype)) * scale
        forbidden = ~state.written[:, None, None]
        scores = scores.masked_fill(forbidden, MASKED)
        p = scores.softmax(-1).masked_fill(forbidden, 0)
        o = torch.einsum("bgrj,bjgd->bgrd", p, v.to(dtype)).flatten(1, 2)
        if not return_entropy:
            return o.unsqueeze(1), None
        entropy = -torch.linalg.vecdot(p, scores.log_softmax(-1)).flatten(1, 2)
    return o.unsqueeze(1), entropy.unsqueeze(1)


def _check_agreement(real: Tensor, lengths: Tensor) -> None:
    """Refuse two that contradict each other."""
    front = torch.arange(real.shape[1]) < lengths[:, None]
    wrong = (real != front).nonzero()
    if len(wrong):
        row, place = wrong[0].tolist()
        raise ValueError(
            f"real must be True at the first {lengths[row]} positions of row {row}, as lengths "
            f"say, got {bool(real[row, place])} at position {place}"
        )


def _check_state(state: LocalState, k: Tensor, v: Tensor, window: int) -> None:
    for name, held, x in (("k", state.k, k), ("v", state.v, v)):
        wanted = (x.shape[0], *x.shape[-2:])
        if (held.shape[0], *held.shape[2:]) != wanted:
            raise ValueError(
                f"state.{name} must be [{wanted[0]}, window, {wanted[1]}, {wanted[2]}] to go with "
                f"{name}, got shape {tuple(held.shape)}"
            )
    if state.window != window:
        raise ValueError(f"window must be that of the state, {state.window}, got {window}")
