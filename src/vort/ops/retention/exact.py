"""The definition: every pair of positions, one sum. Quadratic; what the rest is checked against."""

from collections.abc import Callable

import torch
from torch import Tensor

from vort.names import check_choice
from vort.ops.custom import without_autocast
from vort.ops.retention.inputs import (
    DEFAULT_EPS,
    NORMALIZERS,
    Inputs,
    compute_dtype,
)
from vort.ops.retention.state import RetentionState, each_sequence, starting_state

__all__ = ["exact_retention_with_kernel", "normalize", "retention_exact"]

Kernel = Callable[[Tensor, Tensor], Tensor]


def retention_exact(inputs: Inputs) -> tuple[Tensor, RetentionState | None]:
    """What `retention` returns, summed pair by pair as in eq. keyed-retrieval.

    Memory grows as T^2 S.

    >>> x = torch.ones(1, 3, 1, 1)
    >>> o, _ = retention_exact(Inputs(x, x, x, x, torch.zeros(1), normalizer="none"))
    >>> o.flatten().tolist()
    [1.0, 2.0, 3.0]
    """
    q, k, v, write, log_decay, read, *_ = inputs
    normalizer, include_self = inputs.normalizer, inputs.include_self
    dtype = compute_dtype(q, k, v)
    decay = log_decay.to(dtype).expand(q.shape[2], write.shape[-1])

    def run(
        q: Tensor, k: Tensor, v: Tensor, write: Tensor, read: Tensor, state: RetentionState
    ) -> tuple[Tensor, RetentionState]:
        weights = _pair_weights(write, decay, read, include_self)
        numerator, denominator = _retrieve(q, k, v, weights, normalizer, include_self)
        past, past_sum = _retrieve_state(q, decay, read, state, normalizer)
        if denominator is not None and past_sum is not None:
            denominator = denominator + past_sum
        output = normalize(numerator + past, denominator, inputs.eps)
        return output, _final_state(k, v, write, decay, state, normalizer)

    gate = torch.ones_like(write) if read is None else read
    tensors = [x.to(dtype) for x in (q, k, v, write, gate)]
    start = starting_state(inputs)
    output, final = each_sequence(run, tensors, start, inputs.cu_seqlens)
    return output.to(v.dtype), final if inputs.output_final_state else None


def exact_retention_with_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    order: Tensor,
    kernel: Kernel,
    *,
    normalizer: str = "decayed",
    include_self: bool = True,
    eps: float = DEFAULT_EPS,
) -> Tensor:
    """Retrieval with any memory kernel in place of the exponentials: `[B, T, H, V]`.

    q, k [B, T, H, K]; v [B, T, H, V]; order [B, T, H], the order of each written token.
    `kernel(order, lag)` gets order [B, H, 1, T] and lag [T, T] (int64, never negative) and returns
    weights [B, H, T, T]: row t, column i is what token i weighs after t - i steps. With the
    Grünwald-Letnikov weights this is the paper's "exact fractional convolution". Sums are float32,
    float64 for float64 inputs, whatever autocast says.

    >>> q = k = v = torch.ones(1, 3, 1, 1)
    >>> order = torch.full((1, 3, 1), 2.0)
    >>> halving = lambda order, lag: order ** -lag
    >>> exact_retention_with_kernel(q, k, v, order, halving, normalizer="none").flatten().tolist()
    [1.0, 1.5, 1.75]
    """
    check_choice("normalizer", normalizer, NORMALIZERS)
    dtype = compute_dtype(q, k, v)
    with without_autocast(q):
        lag, seen = _lags(q.shape[1], include_self, q.device)
        weights = kernel(order.to(dtype).transpose(1, 2).unsqueeze(-2), lag)
        weights = torch.where(seen, weights, torch.zeros((), dtype=dtype, device=q.device))
        numerator, denominator = _retrieve(
            q.to(dtype), k.to(dtype), v.to(dtype), weights.to(dtype), normalizer, include_self
        )
        return normalize(numerator, denominator, eps).to(v.dtype)


def normalize(numerator: Tensor, denominator: Tensor | None, eps: float) -> Tensor:
    """The retrieved value `numerator / (|denominator| + eps)`; the numerator itself without one.

    numerator [..., V], denominator [...]. On positive features this is eq. keyed-retrieval with
    eps_0 = eps. Features that are not positive can bring the denominator through zero: adding eps
    to it would then divide by nearly nothing, and its sign would turn the output over. The
    absolute value can do neither.

    >>> normalize(torch.ones(1), torch.tensor(-1.0), 1.0)
    tensor([0.5000])
    """
    if denominator is None:
        return numerator
    return numerator / (denominator.abs() + eps).unsqueeze(-1)


def _lags(length: int, include_self: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Lag t - i of every pair, not below 0, and whether t may see i; both [T, T]."""
    position = torch.arange(length, device=device)
    lag = position[:, None] - position[None, :]
    # Negative lags would overflow in exp and poison the gradient with 0 * inf: clamp, then mask.
    return lag.clamp_min(0), lag >= (0 if include_self else 1)


def _pair_weights(write: Tensor, decay: Tensor, read: Tensor, include_self: bool) -> Tensor:
    """W[t, i] = sum_s read[t, s] exp(log_decay[s] (t - i)) write[i, s]; [B, H, T, T]."""
    lag, seen = _lags(write.shape[1], include_self, write.device)
    aged = torch.exp(decay[:, None, None, :] * lag[..., None]) * seen[..., None]
    return torch.einsum("bths,htis,bihs->bhti", read, aged, write)


def _retrieve(
    q: Tensor, k: Tensor, v: Tensor, weights: Tensor, normalizer: str, include_self: bool
) -> tuple[Tensor, Tensor | None]:
    """Numerator [B, T, H, V] and denominator [B, T, H] over the pairs of this call."""
    scores = torch.einsum("bthk,bihk->bhti", q, k)
    numerator = torch.einsum("bhti,bihv->bthv", scores * weights, v)
    if normalizer == "none":
        return numerator, None
    if normalizer == "decayed":
        return numerator, (scores * weights).sum(-1).transpose(1, 2)
    _, seen = _lags(q.shape[1], include_self, q.device)
    return numerator, (scores * seen).sum(-1).transpose(1, 2)


def _retrieve_state(
    q: Tensor, decay: Tensor, read: Tensor, state: RetentionState, normalizer: str
) -> tuple[Tensor, Tensor | None]:
    """What the initial state adds to numerator and denominator: it lies one step before token 0."""
    lag = torch.arange(1, q.shape[1] + 1, device=q.device)
    aged = read * torch.exp(decay * lag[:, None, None])
    numerator = torch.einsum("bths,bthk,bhskv->bthv", aged, q, state.G)
    if state.b is None:
        return numerator, None
    if normalizer == "undecayed":
        return numerator, torch.einsum("bthk,bhk->bth", q, state.b[:, :, 0])
    return numerator, torch.einsum("bths,bthk,bhsk->bth", aged, q, state.b)


def _final_state(
    k: Tensor, v: Tensor, write: Tensor, decay: Tensor, state: RetentionState, normalizer: str
) -> RetentionState:
    """The state after the last token (eq. G-rec and b-rec, unrolled)."""
    length = k.shape[1]
    lag = torch.arange(length - 1, -1, -1, device=k.device)
    aged = write * torch.exp(decay * lag[:, None, None])
    forgotten = torch.exp(decay * length)
    G = forgotten[..., None, None] * state.G + torch.einsum("bihs,bihk,bihv->bhskv", aged, k, v)
    if state.b is None:
        return RetentionState(G, None)
    if normalizer == "undecayed":
        return RetentionState(G, state.b + k.sum(1).unsqueeze(2))
    b = forgotten[..., None] * state.b + torch.einsum("bihs,bihk->bhsk", aged, k)
    return RetentionState(G, b)
