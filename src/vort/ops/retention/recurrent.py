"""One token at a time: decoding in constant memory, and the recurrences of the paper as written."""

import math

import torch
from torch import Tensor

from vort.names import check_choice
from vort.ops.custom import without_autocast
from vort.ops.gpu.launcher import transformed
from vort.ops.retention.exact import normalize
from vort.ops.retention.inputs import (
    DEFAULT_EPS,
    NORMALIZERS,
    Inputs,
    b_rows,
    check_finite,
    compute_dtype,
)
from vort.ops.retention.state import RetentionState, each_sequence, starting_state

__all__ = ["decay_in_parts", "retention_recurrent", "retention_step"]


def retention_step(
    state: RetentionState,
    q_t: Tensor,
    k_t: Tensor,
    v_t: Tensor,
    write_t: Tensor,
    log_decay: Tensor,
    *,
    read_t: Tensor | None = None,
    normalizer: str = "decayed",
    include_self: bool = True,
    eps: float = DEFAULT_EPS,
    inplace: bool = False,
) -> tuple[Tensor, RetentionState]:
    """The output at one token `[B, H, V]` and the state after it (eq. G-rec, retrieval-final).

    q_t, k_t [B, H, K]; v_t [B, H, V]; write_t, read_t [B, H, S]; log_decay [S] or [H, S].
    `inplace=True` overwrites the given state, which must not need a gradient: decoding then
    allocates nothing that grows. Sums are taken in the state's dtype: a float64 state keeps a
    memory that hardly forgets exact over millions of tokens.

    >>> from vort.ops.retention import empty_state
    >>> state = empty_state(1, 1, 1, 1, 1)
    >>> one = torch.ones(1, 1, 1)
    >>> o, state = retention_step(state, one, one, 3 * one, one, torch.zeros(1))
    >>> round(o.item(), 4), state.G.item()
    (3.0, 3.0)
    """
    _check(state, q_t, k_t, v_t, write_t, log_decay, read_t, normalizer)
    check_finite(
        {"state.G": state.G, "state.b": state.b, "q_t": q_t, "k_t": k_t, "v_t": v_t}
        | {"write_t": write_t, "log_decay": log_decay, "read_t": read_t}
    )
    options = (normalizer, include_self, eps, inplace)
    given = (state, q_t, k_t, v_t, write_t, log_decay, read_t, *options)
    with without_autocast(q_t):
        return _step(*given)


def _step(
    state: RetentionState,
    q_t: Tensor,
    k_t: Tensor,
    v_t: Tensor,
    write_t: Tensor,
    log_decay: Tensor,
    read_t: Tensor | None,
    normalizer: str,
    include_self: bool,
    eps: float,
    inplace: bool,
) -> tuple[Tensor, RetentionState]:
    dtype = state.G.dtype
    q, k, v, write = (x.to(dtype) for x in (q_t, k_t, v_t, write_t))
    batch, heads, num_scales, key_dim, value_dim = state.G.shape
    kept, aged = (x.expand(heads, num_scales) for x in decay_in_parts(log_decay.to(dtype)))
    gate = q.new_ones(1).expand(write.shape) if read_t is None else read_t.to(dtype)
    if not include_self:
        gate = gate * (kept + aged)
    rows = num_scales * key_dim
    query = (gate.unsqueeze(-1) * q.unsqueeze(-2)).reshape(batch * heads, 1, rows)
    written = write.unsqueeze(-1) * k.unsqueeze(-2)

    # The change is small beside the state: it is summed up first, so that one rounding follows.
    # In place, but where torch.func may have more states or decays than changes.
    add = torch.addcmul if transformed() else Tensor.addcmul_
    change = add(written.unsqueeze(-1) * v[:, :, None, None], state.G, aged[..., None, None])
    at_once = inplace and include_self and not (torch.is_grad_enabled() or transformed())
    if at_once:  # by one pass over the states fewer
        G = torch.addcmul(change, state.G, kept[..., None, None], out=state.G)
    else:
        G = add(change, state.G, kept[..., None, None])
    b = state.b
    if b is not None and normalizer == "decayed":
        b = torch.addcmul(torch.addcmul(written, b, aged[..., None]), b, kept[..., None])
    elif b is not None:
        b = b + k.unsqueeze(2)
    after = RetentionState(G, b)
    seen = after if include_self else state
    output = _read(query, q, seen, normalizer, eps).view(batch, heads, value_dim)
    if inplace:
        G = G if at_once else state.G.copy_(G)
        after = RetentionState(G, b if b is None or state.b is None else state.b.copy_(b))
    return output.to(v_t.dtype), after


def _check(
    state: RetentionState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    write: Tensor,
    log_decay: Tensor,
    read: Tensor | None,
    normalizer: str,
) -> None:
    """Raise ValueError unless a token and a normaliser go with the state; shapes alone are read."""
    check_choice("normalizer", normalizer, NORMALIZERS)
    batch, heads, num_scales, key_dim, value_dim = state.G.shape
    keys, gates = (batch, heads, key_dim), (batch, heads, num_scales)
    tokens = (
        ("q_t", q, keys),
        ("k_t", k, keys),
        ("v_t", v, (batch, heads, value_dim)),
        ("write_t", write, gates),
        ("read_t", read, gates),
    )
    for name, x, wanted in tokens:
        if x is not None and x.shape != wanted:
            raise ValueError(
                f"{name} must be {list(wanted)} to go with the state, got {list(x.shape)}"
            )
    if log_decay.shape not in ((num_scales,), (heads, num_scales)):
        raise ValueError(
            f"log_decay must be [{num_scales}] or [{heads}, {num_scales}] to go with the state, "
            f"got {list(log_decay.shape)}"
        )
    rows, b = b_rows(normalizer, num_scales), state.b
    if rows == 0 and b is not None:
        raise ValueError("state.b must be None with normalizer 'none', got a tensor")
    if rows and (b is None or b.shape != (batch, heads, rows, key_dim)):
        raise ValueError(
            f"state.b must be {[batch, heads, rows, key_dim]} with normalizer {normalizer!r}, "
            f"got {None if b is None else list(b.shape)}"
        )


def decay_in_parts(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """What a step keeps of a state as it is, 1 or 0, and the share of it that it adds.

    Together they are exp(l). Rounded, that is a rate several percent off where l is near -1e-6, so
    a slow state is kept and expm1(l) of it added; and 1 + expm1(l) has no digit left where l is
    near -17, so of a fast one nothing is kept.

    >>> kept, aged = decay_in_parts(torch.tensor([-1e-9, -17.0]))
    >>> kept.tolist(), [f"{x:.1e}" for x in aged.tolist()]
    ([1.0, 0.0], ['-1.0e-09', '4.1e-08'])
    """
    slow = log_decay >= -math.log(2)
    return slow.to(log_decay.dtype), torch.where(slow, log_decay.expm1(), log_decay.exp())


def _read(query: Tensor, q: Tensor, state: RetentionState, normalizer: str, eps: float) -> Tensor:
    """The retrieved value [B H, V] from query [B H, 1, S K] (gate times q) and q [B, H, K]."""
    numerator = torch.bmm(query, state.G.flatten(0, 1).flatten(1, 2)).squeeze(1)
    b = state.b
    if b is None:
        return numerator
    asked = query.view(b.shape) if normalizer == "decayed" else q.unsqueeze(2)
    return normalize(numerator, (asked * b).sum((-1, -2)).flatten(), eps)


def retention_recurrent(inputs: Inputs) -> tuple[Tensor, RetentionState | None]:
    """What `retention` returns, by what `retention_step` does at every token.

    Memory is constant without gradients; with them autograd keeps every state, so train with
    `chunk`.

    >>> x = torch.ones(1, 3, 1, 1)
    >>> o, _ = retention_recurrent(Inputs(x, x, x, x, torch.zeros(1), normalizer="none"))
    >>> o.flatten().tolist()
    [1.0, 2.0, 3.0]
    """
    q, k, v, write, log_decay, read, *_ = inputs
    decay = log_decay.to(compute_dtype(q, k, v)).expand(q.shape[2], write.shape[-1])

    def run(
        q: Tensor, k: Tensor, v: Tensor, write: Tensor, read: Tensor | None, state: RetentionState
    ) -> tuple[Tensor, RetentionState]:
        outputs = []
        for t in range(q.shape[1]):
            output, state = _step(
                state,
                q[:, t],
                k[:, t],
                v[:, t],
                write[:, t],
                decay,
                None if read is None else read[:, t],
                inputs.normalizer,
                inputs.include_self,
                inputs.eps,
                inplace=False,  # the state given is the caller's
            )
            outputs.append(output)
        if outputs:
            return torch.stack(outputs, 1), state
        # A copy, as every step makes one: the caller may move on in place what is handed back.
        kept = RetentionState(state.G.clone(), None if state.b is None else state.b.clone())
        return torch.empty_like(v), kept

    start = starting_state(inputs)
    output, final = each_sequence(run, [q, k, v, write, read], start, inputs.cu_seqlens)
    return output, final if inputs.output_final_state else None
