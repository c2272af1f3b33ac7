"""One token at a time: decoding in constant memory, and the recurrences of the paper as written."""

import torch
from torch import Tensor

from vort.names import check_choice
from vort.ops.custom import without_autocast
from vort.ops.gpu.launcher import debugging, transformed
from vort.ops.retention.exact import normalize
from vort.ops.retention.inputs import (
    DEFAULT_EPS,
    NORMALIZERS,
    Inputs,
    b_rows,
    check_decay_shape,
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
    if not torch.compiler.is_compiling() and debugging():
        check_finite(
            {"state.G": state.G, "state.b": state.b, "q_t": q_t, "k_t": k_t, "v_t": v_t}
            | {"write_t": write_t, "log_decay": log_decay, "read_t": read_t}
        )
    options = (normalizer, include_self, eps, inplace)
    with without_autocast(q_t):
        decay = _decay_of(log_decay, state.G.dtype, *state.G.shape[1:3])
        return _step(state, q_t, k_t, v_t, write_t, decay, read_t, *options)


def _step(
    state: RetentionState,
    q_t: Tensor,
    k_t: Tensor,
    v_t: Tensor,
    write_t: Tensor,
    decay: tuple[Tensor, Tensor],
    read_t: Tensor | None,
    normalizer: str,
    include_self: bool,
    eps: float,
    inplace: bool,
) -> tuple[Tensor, RetentionState]:
    """decay: of `_decay_of`."""
    dtype, (kept, aged) = state.G.dtype, decay
    q, k, v, write = (x.to(dtype) for x in (q_t, k_t, v_t, write_t))
    batch, heads, num_scales, key_dim, value_dim = state.G.shape
    gate = q.new_ones(1).expand(write.shape) if read_t is None else read_t.to(dtype)
    if not include_self:
        gate = gate * (kept + aged)[..., 0, 0]
    rows = num_scales * key_dim
    query = (gate.unsqueeze(-1) * q.unsqueeze(-2)).reshape(batch * heads, 1, rows)
    written = write.unsqueeze(-1) * k.unsqueeze(-2)

    # The change is small beside the state: it is summed up first, so that one rounding follows.
    # In place, but where torch.func may have more states or decays than changes.
    looked_on = transformed()
    add = torch.addcmul if looked_on else Tensor.addcmul_
    change = add(written.unsqueeze(-1) * v[:, :, None, None], state.G, aged)
    # By one pass over the states fewer; a graph takes none that do not lie in order.
    at_once = inplace and include_self and not (torch.is_grad_enabled() or looked_on)
    if at_once and not torch.compiler.is_compiling():
        G = torch.addcmul(change, state.G, kept, out=state.G)
    else:
        G = add(change, state.G, kept)
    b = state.b
    if b is not None and normalizer == "decayed":
        b = torch.addcmul(torch.addcmul(written, b, aged[..., 0]), b, kept[..., 0])
    elif b is not None:
        b = b + k.unsqueeze(2)
    after = RetentionState(G, b)
    seen = after if include_self else state
    output = _read(query, q, seen, normalizer, eps).view(batch, heads, value_dim)
    if inplace:
        G = G if G is state.G else state.G.copy_(G)
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
    check_decay_shape(log_decay, heads, num_scales, "to go with the state")
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
    left = log_decay.exp()
    kept = left.detach().round()
    # By shares of 0 and 1: a choice, for one small call fewer.
    return kept, torch.lerp(left, log_decay.expm1(), kept)


def _decay_of(
    log_decay: Tensor, dtype: torch.dtype, heads: int, num_scales: int
) -> tuple[Tensor, Tensor]:
    """`decay_in_parts` beside states, [H, S, 1, 1] each, of log_decay [S] or [H, S]."""
    return decay_in_parts(log_decay.to(dtype).expand(heads, num_scales)[..., None, None])


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
    decay = _decay_of(log_decay, compute_dtype(q, k, v), q.shape[2], write.shape[-1])

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
