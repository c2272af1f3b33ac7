"""A causal convolution over the last few positions, each channel by itself, then silu.

`short_convolution` is the op alone. `to_heads` is what a layer does with it: convolution, RMS norm
of each head's queries and keys, RoPE for the part of the layer that wants it, and learned features
for the part that wants those. On a GPU kernels (`triton/`) do all of it in one pass; elsewhere it
is a few lines of PyTorch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vort.ops.bounds import ages
from vort.ops.custom import checks_values, traced
from vort.ops.gpu.launcher import kernels_take
from vort.ops.local_attention.checks import check_cu_seqlens
from vort.ops.local_attention.rope import apply_rope_to_both
from vort.ops.padding import check_lengths, keep_last
from vort.ops.rms_norm import rms_norm
from vort.ops.short_convolution.block import convolved, fits, taps_in_blocks

__all__ = ["Heads", "computed_again", "short_convolution", "to_heads"]

# Taps that kernels have by name.
LONGEST = 4
# The most coordinates of a head, and the most logits of its map, that fit in registers together.
WIDEST = 128


class Heads(NamedTuple):
    """What a layer's parts are given.

    Attributes:
        q: queries `[B, T, H, D]`; their features `[B, T, H, 2 M]` where `mapped`.
        k: keys `[B, T, Hkv, D]`, likewise.
        v: values `[B, T, Hkv, D]`.
        turned_q: queries turned by RoPE; the same as q without it.
        turned_k: keys, likewise.
        near_v: values again, for whoever reads turned heads: two readers' gradients then meet where
            they are used.
        state: `[B, W - 1, C]`, the last inputs of the convolution, where asked for.
        mapped: whether q and k went through their feature maps.
        again: computes the turned ones once more; None where they are as well kept.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    turned_q: Tensor
    turned_k: Tensor
    near_v: Tensor
    state: Tensor | None
    mapped: bool = False
    again: Callable[[], Sequence[Any]] | None = None


def short_convolution(
    x: Tensor,
    weight: Tensor,
    state: Tensor | None = None,
    *,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """silu(Σ_j weight[:, j] x_{t-j}) for j < W, and the state after it if asked for.

    Args:
        x: `[B, T, C]`, zero at padding.
        weight: `[C, W]`, the tap of the position itself first.
        state: `[B, W - 1, C]`, the inputs before `x`; zeros without it.
        lengths: `[B]` real positions at the front of each row; all of them by default.
        cu_seqlens: `[N + 1]` bounds of packed sequences, B = 1; not together with a state, nor with
            output_state. On a GPU their values are looked at under `VORT_DEBUG=1` alone.
        output_state: whether to return the last W - 1 inputs of every row.

    >>> x, weight = torch.randn(2, 5, 8), torch.randn(8, 4)
    >>> whole, _ = short_convolution(x, weight)
    >>> first, state = short_convolution(x[:, :3], weight, output_state=True)
    >>> rest, _ = short_convolution(x[:, 3:], weight, state)
    >>> torch.allclose(torch.cat([first, rest], 1), whole, atol=1e-6)
    True
    """
    _check(x, weight, state, cu_seqlens)
    if cu_seqlens is not None and output_state:
        raise ValueError(
            "output_state must be off with cu_seqlens, got True: a state is of one sequence a row"
        )
    if lengths is not None:
        check_lengths(lengths, *x.shape[:2])
    past = None if state is None else state.to(x.dtype)
    age = None if cu_seqlens is None else ages(cu_seqlens, x.shape[1])
    # Channels by twos: what the kernels call a head is any even number of them.
    size = next((d for d in (64, 32, 16, 8, 4, 2) if x.shape[2] % d == 0), 0)
    if size and _fused(x, weight, past):
        from .triton import Inputs, heads_fused

        options = (None, None, None, None, None, None, x.shape[2] // size, 0, 0.0, False)
        y = heads_fused(Inputs(x, weight, past, age, *options))[0].flatten(2)
    else:
        y = _composed(x, weight, past, age)
    return y, _after(x, weight, past, lengths) if output_state else None


def to_heads(
    projections: Sequence[Tensor],
    num_heads: int,
    num_key_value_heads: int,
    weight: Tensor | None = None,
    state: Tensor | None = None,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    rope_base: float | None = None,
    features: tuple[Tensor, Tensor] | None = None,
    seen: Tensor | None = None,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_state: bool = False,
    in_place: bool = False,
) -> Heads:
    """Queries, keys and values of all heads from their projections.

    Args:
        projections: one tensor `[B, T, C]`, C = (H + 2 Hkv) D, or three that make it up; zero at
            padding.
        num_heads: H.
        num_key_value_heads: Hkv.
        weight: `[C, W]` of the short convolution; None: there is none, nor its silu.
        state: `[B, W - 1, C]`, the convolution's inputs before `x`.
        q_norm: `[D]`, weight of the queries' RMS norm; None: no norm.
        k_norm: `[D]` of the keys', likewise.
        eps: of both norms.
        rope_base: base of RoPE; None: nothing is turned.
        features: weights `[H, D, M]` of the learned maps of queries and of keys, to be applied by
            the kernels where they can; `Heads.mapped` says whether they were.
        seen: `[B]` positions before `x` in each row; none by default.
        lengths: `[B]` real positions at the front of each row; all of them by default.
        cu_seqlens: `[N + 1]` bounds of packed sequences, B = 1; not together with a state.
        output_state: whether to return the convolution's state after the last position.
        in_place: for one position, T = 1, without gradients: `state` may be moved on and returned.

    >>> heads = to_heads([torch.randn(2, 5, 24)], 2, 1, torch.randn(24, 4), rope_base=1e4)
    >>> heads.q.shape, heads.turned_k.shape
    (torch.Size([2, 5, 2, 6]), torch.Size([2, 5, 1, 6]))
    """
    sizes = [num_heads, num_key_value_heads, num_key_value_heads]
    if weight is None and len(projections) == 3:
        x, parts = (
            projections[0],
            [p.unflatten(-1, (n, -1)) for p, n in zip(projections, sizes, strict=True)],
        )
    else:
        x, parts = torch.cat(list(projections), -1) if len(projections) > 1 else projections[0], []
    if weight is not None:
        _check(x, weight, state, cu_seqlens)
    age = None if cu_seqlens is None else ages(cu_seqlens, x.shape[1])
    past = None if state is None else state.to(x.dtype)
    even = x.shape[2] // (num_heads + 2 * num_key_value_heads) % 2 == 0
    # Without a convolution, heads that are neither normed nor turned nor mapped are there already.
    work = any(y is not None for y in (weight, q_norm, rope_base, features))
    if work and not parts and even and _fused(x, weight, past):
        return _by_kernels(
            x, num_heads, num_key_value_heads, weight, past, age, q_norm, k_norm, eps, rope_base,
            features, seen, lengths, output_state, in_place and past is state,
        )  # fmt: skip
    if not parts:
        y = x if weight is None else _composed(x, weight, past, age)
        parts = list(y.unflatten(-1, (sum(sizes), -1)).split(sizes, 2))
    q, k, v = parts
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    turned = q, k
    if rope_base is not None:
        position = torch.arange(x.shape[1], device=x.device) if age is None else age
        position = position if seen is None else seen[:, None] + position
        turned = apply_rope_to_both(q, k, position, rope_base)
    keeps = output_state and weight is not None
    return Heads(q, k, v, *turned, v, _after(x, weight, past, lengths) if keeps else None)  # type: ignore[arg-type]


def _by_kernels(
    x: Tensor,
    num_heads: int,
    num_key_value_heads: int,
    weight: Tensor | None,
    state: Tensor | None,
    age: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    rope_base: float | None,
    features: tuple[Tensor, Tensor] | None,
    seen: Tensor | None,
    lengths: Tensor | None,
    output_state: bool,
    in_place: bool,
) -> Heads:
    """`to_heads` by the kernels."""
    from . import triton

    dim = x.shape[2] // (num_heads + 2 * num_key_value_heads)
    cos = sin = None
    if rope_base is not None:
        positions: int | Tensor = x.shape[1]
        if seen is not None:
            positions = seen[:, None]
            if x.shape[1] > 1:
                positions = positions + torch.arange(x.shape[1], device=x.device)
        cos, sin = triton.turn_table(positions, dim, rope_base, x.device)
    given = (x, weight, state, age, q_norm, k_norm, cos, sin)
    sizes = (num_heads, num_key_value_heads, eps)
    moves = in_place and output_state and x.shape[1] == 1 and lengths is None
    if moves and state is not None and state.is_contiguous():
        inputs = triton.Inputs(*given, None, None, *sizes, twice=False)
        q, k, v, turned_q, turned_k = triton.heads_step(inputs)
        return Heads(q, k, v, *((q, k) if turned_q is None else (turned_q, turned_k)), v, state)
    q_map, k_map = features if features is not None and _fit(x, dim, *features) else (None, None)
    inputs = triton.Inputs(*given, q_map, k_map, *sizes, twice=cos is not None)
    q, k, v, turned_q, turned_k, near_v = triton.heads_fused(inputs)
    keeps = output_state and weight is not None
    after = _after(x, weight, state, lengths) if keeps else None  # type: ignore[arg-type]
    mapped = q_map is not None
    again = None
    if turned_q is None:
        turned_q, turned_k = q, k
    elif q.requires_grad and not traced(x):
        plain: Any = [t.detach() if isinstance(t, Tensor) else t for t in inputs]
        again = partial(triton.turned_again, triton.Inputs(*plain))
    near_v = v if near_v is None else near_v
    return Heads(q, k, v, turned_q, turned_k, near_v, after, mapped, again)


def _fit(x: Tensor, dim: int, *maps: Tensor) -> bool:
    """Whether kernels can apply maps of these weights beside all else."""
    heads = x.shape[2] // (3 * dim)
    return all(
        w.ndim == 3
        and w.shape[:2] == (heads, dim)
        and dim <= WIDEST
        and w.shape[2] <= WIDEST
        and w.shape == maps[0].shape
        and w.dtype == maps[0].dtype
        and w.dtype in (torch.bfloat16, torch.float32)
        and w.device == x.device
        for w in maps
    )


@contextmanager
def computed_again(heads: Heads) -> Iterator[None]:
    """What is called within keeps no turned heads for its backward: they are computed again.

    Of what a layer hands to its parts they are the two tensors that take least to be had again,
    each as large as the hidden states; features and values would take twice as long.
    """
    if heads.again is None:
        yield
        return
    compute = heads.again
    # Numbers and types alone go into the hooks: what they held would live as long as the graph.
    turned = (heads.turned_q, heads.turned_k)
    dtypes = [x.dtype for x in turned]
    numbers = {(x.data_ptr(), x.numel()): i for i, x in enumerate(turned)}
    # Those that have a storage to themselves, of which a part may be kept as well.
    storages = {
        x.untyped_storage().data_ptr(): i
        for i, x in enumerate(turned)
        if x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes
    }
    made: list[Sequence[Any]] = []

    def pack(x: Tensor) -> Any:
        number = numbers.get((x.data_ptr(), x.numel())) if x.is_contiguous() else None
        if number is not None:
            return number, x.shape, None, 0
        number = storages.get(x.untyped_storage().data_ptr())
        if number is None or x.dtype != dtypes[number]:
            # Detached: an output would hold the node that holds it, and neither would be freed.
            return x.detach()
        return number, x.shape, x.stride(), x.storage_offset()

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if not made:
            made.append(compute())
        number, shape, stride, offset = kept
        whole: Tensor = made[0][number]
        if stride is None:
            return whole.view(shape)
        return whole.as_strided(shape, stride, whole.storage_offset() + offset)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _composed(x: Tensor, weight: Tensor, state: Tensor | None, age: Tensor | None) -> Tensor:
    """silu of the convolution in PyTorch."""
    if state is None and age is None and fits(x, weight):
        return F.silu(taps_in_blocks(x, weight))
    past = x.new_zeros(x.shape[0], weight.shape[1] - 1, x.shape[2]) if state is None else state
    return F.silu(convolved(x, weight.to(x.dtype), torch.cat([past, x], 1), age))


def _after(x: Tensor, weight: Tensor, state: Tensor | None, lengths: Tensor | None) -> Tensor:
    """The last W - 1 inputs of every row."""
    if state is None:
        state = x.new_zeros(x.shape[0], weight.shape[1] - 1, x.shape[2])
    return keep_last(state, x, lengths)


def _fused(x: Tensor, weight: Tensor | None, state: Tensor | None) -> bool:
    """Whether kernels can do it; they send no gradient to a state."""
    differentiable = state is not None and state.requires_grad and torch.is_grad_enabled()
    known = True
    if weight is not None:
        known = weight.dtype in (torch.bfloat16, torch.float32) and weight.device == x.device
        known = known and weight.shape[1] <= LONGEST
    full = x.shape[0] * x.shape[1] > 0
    return known and full and kernels_take(x) and not differentiable


def _check(x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> None:
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[0] != x.shape[2]:
        raise ValueError(
            f"x must be [B, T, C] and weight [C, W], got {list(x.shape)} and {list(weight.shape)}"
        )
    if weight.shape[1] < 2:
        raise ValueError(f"weight must have at least 2 taps, got {weight.shape[1]}")
    if cu_seqlens is not None and (state is not None or x.shape[0] != 1):
        raise ValueError("cu_seqlens needs B = 1 and no state: packed sequences start afresh")
    if cu_seqlens is not None:
        values = checks_values(x)
        check_cu_seqlens(cu_seqlens, *x.shape[:2], values=values)
    wanted = [x.shape[0], weight.shape[1] - 1, x.shape[2]]
    if state is not None and list(state.shape) != wanted:
        raise ValueError(f"state must be {wanted}, got {list(state.shape)}")
