"""Local attention as one reads it: a quadratic reference in which every weight is visible."""

import torch
from torch import Tensor

from vort.ops.bounds import sequence_starts
from vort.ops.custom import without_autocast

from .block import MASKED, working_dtype
from .checks import check_cu_seqlens, check_heads, check_padding_mask, check_window
from .rope import apply_rope


def allowed_keys(
    batch: int,
    length: int,
    window: int,
    start: Tensor,
    padding_mask: Tensor | None,
) -> Tensor:
    """Return `[B, T, T]`: whether query t may see key j."""
    position = torch.arange(length, device=start.device)
    lag = position[:, None] - position[None, :]
    allowed = (lag >= 0) & (lag < window) & (position[None, :] >= start[:, None])
    allowed = allowed.expand(batch, length, length)
    if padding_mask is None:
        return allowed
    return allowed & padding_mask[:, None, :] & padding_mask[:, :, None]


def local_attention_exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    *,
    scale: float | None = None,
    rope_base: float | None = None,
    padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return what `local_attention` returns, by the definition, in O(T²) memory.

        a_tj = softmax_j(scale q_t·k_j)  over t - window < j <= t in the sequence of t,
        o_t = sum_j a_tj v_j,    H_t = -sum_j a_tj log a_tj.

    Shapes and arguments as in `local_attention`.

    Example:
        >>> q = k = v = torch.randn(1, 6, 2, 4, dtype=torch.float64)
        >>> o, entropy = local_attention_exact(q, k, v, window=1, return_entropy=True)
        >>> torch.equal(o, v), entropy.abs().max().item()
        (True, 0.0)
    """
    check_window(window)
    check_heads(q, k, v)
    B, T, H, D = q.shape
    check_padding_mask(padding_mask, torch.Size((B, T)))
    check_cu_seqlens(cu_seqlens, B, T)
    start = torch.zeros(T, dtype=torch.int64, device=q.device)
    if cu_seqlens is not None:
        start = sequence_starts(T, cu_seqlens, q.device)
    if rope_base is not None:
        position = torch.arange(T, device=q.device) - start
        q, k = apply_rope(q, position, rope_base), apply_rope(k, position, rope_base)
    forbidden = ~allowed_keys(B, T, window, start, padding_mask)[:, None]

    out_dtype, dtype = v.dtype, working_dtype(q, k, v)
    with without_autocast(q):
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        k, v = (x.repeat_interleave(H // x.shape[2], dim=2) for x in (k, v))
        scores = torch.einsum("bthd,bjhd->bhtj", q, k) * (D**-0.5 if scale is None else scale)
        # A row with no key at all: a softmax over equal scores, then nothing of it.
        weights = scores.masked_fill(forbidden, MASKED).softmax(-1).masked_fill(forbidden, 0)
        o = torch.einsum("bhtj,bjhd->bthd", weights, v).to(out_dtype)
    if not return_entropy:
        return o, None
    log_weights = weights.masked_fill(weights == 0, 1).log()
    return o, -(weights * log_weights).sum(-1).transpose(1, 2)
