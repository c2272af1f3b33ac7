"""One token at a time: decoding in constant memory, and the recurrences of the paper as written."""

import torch
from torch import Tensor

from vort.ops.retention.normalizer import DEFAULT_EPS, normalize
from vort.ops.retention.state import RetentionState, compute_dtype, starting_state
from vort.ops.retention.varlen import each_sequence

__all__ = ["retention_recurrent", "retention_step"]


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
    dtype = state.G.dtype
    q, k, v, write = (x.to(dtype) for x in (q_t, k_t, v_t, write_t))
    batch, heads, terms, key_dim, value_dim = state.G.shape
    # exp(l) rounds to a rate several percent off when l is near -1e-6; 1 + expm1(l) need not.
    forget = torch.expm1(log_decay.to(dtype)).expand(heads, terms)
    gate = q.new_ones(1).expand(batch, heads, terms) if read_t is None else read_t.to(dtype)
    if not include_self:
        gate = gate * (1 + forget)
    query = (gate.unsqueeze(-1) * q.unsqueeze(-2)).view(batch * heads, 1, terms * key_dim)
    written = write.unsqueeze(-1) * k.unsqueeze(-2)

    # The change is small beside the state: it is summed up first, so that one rounding follows.
    change = (state.G * forget[..., None, None]).view(batch * heads, terms * key_dim, value_dim)
    change = change.baddbmm_(
        written.view(batch * heads, terms * key_dim, 1), v.reshape(batch * heads, 1, value_dim)
    )
    G = _add(state.G, change.view(state.G.shape), inplace and include_self)
    b = state.b
    if b is not None:
        counted = k.unsqueeze(2)
        if normalizer == "decayed":
            counted = torch.addcmul(written, b, forget[..., None])
        b = _add(b, counted, inplace and include_self)
    after = RetentionState(G, b)
    seen = after if include_self else state
    output = _read(query, q, seen, normalizer, eps).view(batch, heads, value_dim)
    if inplace and not include_self:
        state.G.copy_(G)
        after = RetentionState(state.G, b if b is None or state.b is None else state.b.copy_(b))
    return output.to(v_t.dtype), after


def _add(state: Tensor, change: Tensor, inplace: bool) -> Tensor:
    return state.add_(change) if inplace else state + change


def _read(query: Tensor, q: Tensor, state: RetentionState, normalizer: str, eps: float) -> Tensor:
    """The retrieved value [B H, V] from query [B H, 1, S K] (gate times q) and q [B, H, K]."""
    numerator = torch.bmm(query, state.G.flatten(0, 1).flatten(1, 2)).squeeze(1)
    b = state.b
    if b is None:
        return numerator
    asked = query.view(b.shape) if normalizer == "decayed" else q.unsqueeze(2)
    return normalize(numerator, (asked * b).sum((-1, -2)).flatten(), eps)


def retention_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    write: Tensor,
    log_decay: Tensor,
    *,
    read: Tensor | None = None,
    normalizer: str = "decayed",
    include_self: bool = True,
    initial_state: RetentionState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    eps: float = DEFAULT_EPS,
) -> tuple[Tensor, RetentionState | None]:
    """What `retention` returns, by `retention_step` at every token.

    Arguments and shapes are those of `retention`; `chunk_size` is unused. Memory is constant
    without gradients; with them autograd keeps every state, so train with `chunk`.

    >>> q = k = v = write = torch.ones(1, 3, 1, 1)
    >>> o, _ = retention_recurrent(q, k, v, write, torch.zeros(1), normalizer="none")
    >>> o.flatten().tolist()
    [1.0, 2.0, 3.0]
    """
    dtype = compute_dtype(q, k, v)
    decay = log_decay.to(dtype).expand(q.shape[2], write.shape[-1])
    start = starting_state(initial_state, q, v, write, normalizer, cu_seqlens)
    tracked = [q, k, v, write, log_decay, read, start.G, start.b]
    wants_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tracked)

    def run(
        q: Tensor, k: Tensor, v: Tensor, write: Tensor, read: Tensor | None, state: RetentionState
    ) -> tuple[Tensor, RetentionState]:
        outputs = []
        if not wants_grad:
            state = RetentionState(state.G.clone(), None if state.b is None else state.b.clone())
        for t in range(q.shape[1]):
            output, state = retention_step(
                state,
                q[:, t],
                k[:, t],
                v[:, t],
                write[:, t],
                decay,
                read_t=None if read is None else read[:, t],
                normalizer=normalizer,
                include_self=include_self,
                eps=eps,
                inplace=not wants_grad,
            )
            outputs.append(output)
        return torch.stack(outputs, 1) if outputs else torch.empty_like(v), state

    output, final = each_sequence(run, [q, k, v, write, read], start, cu_seqlens)
    return output, final if output_final_state else None
