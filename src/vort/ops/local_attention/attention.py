"""The public form of local attention: checks, rotation, padding, then a backend."""

from typing import Literal, get_args

import torch
from torch import Tensor

from vort.ops.bounds import sequence_starts
from vort.ops.custom import checks_values, traced, without_autocast
from vort.ops.gpu.launcher import debugging, kernels_take, require_kernels, transformed
from vort.ops.retention.inputs import check_finite

from .block import attend_blockwise
from .checks import WIDEST, check_cu_seqlens, check_heads, check_padding_mask, check_window
from .exact import local_attention_exact
from .rope import apply_rope

__all__ = ["LocalBackend", "attend", "local_attention", "silence"]

LocalBackend = Literal["auto", "block", "exact", "triton"]


def local_attention(
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
    backend: LocalBackend = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Return causal sliding-window attention and, on request, the entropy of each row.

    Shapes: q `[B, T, H, D]`, k `[B, T, Hkv, D]`, v `[B, T, Hkv, V]` with H a multiple of Hkv; the
    output is `[B, T, H, V]` in the type of v, the entropy H_t = -sum_j a_tj log a_tj (eq. routing)
    `[B, T, H]` in float32 (float64 for float64 inputs). Both are differentiable.

    Args:
        q: queries.
        k: keys.
        v: values.
        window: positions attended to, the current one included.
        scale: factor on q·k; 1/sqrt(D) by default.
        rope_base: turn q and k by their positions (see `apply_rope`); None leaves them as they are.
        padding_mask: `[B, T]` bool, False at padding. A padded position neither attends nor is
            attended to: its output and entropy are zero, whatever it holds.
        cu_seqlens: `[N + 1]` integers, bounds of sequences packed into a batch of one; positions
            count from each start. Sequences may be empty. On a GPU their values are looked at under
            `VORT_DEBUG=1` alone: that would stop its queue.
        return_entropy: also compute the entropy; otherwise None stands in its place.
        backend: "block" (linear memory), "triton" (the same fused into GPU kernels), "exact"
            (quadratic, for tests); "auto" is "triton" where it applies (bfloat16 or float32 on a
            GPU, head dimensions up to 128), else "block".

    Example:
        >>> q, k, v = torch.randn(3, 1, 100, 2, 16)
        >>> o, entropy = local_attention(q, k, v, window=8, rope_base=1e4, return_entropy=True)
        >>> o.shape, entropy.shape, bool((entropy[:, 8:] <= torch.tensor(8.0).log() + 1e-6).all())
        (torch.Size([1, 100, 2, 16]), torch.Size([1, 100, 2]), True)
    """
    if backend not in (known := get_args(LocalBackend)):
        raise ValueError(f"backend must be one of {', '.join(known)}, got {backend!r}")
    check_window(window)
    check_heads(q, k, v)
    B, T = q.shape[:2]
    check_padding_mask(padding_mask, torch.Size((B, T)))
    # Looking at bounds would stop a GPU's queue, in every layer.
    values = checks_values(q)
    check_cu_seqlens(cu_seqlens, B, T, values=values)
    check_numbers(q, k, v, padding_mask)
    start = None if cu_seqlens is None else sequence_starts(T, cu_seqlens, q.device)
    if rope_base is not None:
        position = torch.arange(T, device=q.device)
        position = position if start is None else position - start
        q, k = apply_rope(q, position, rope_base), apply_rope(k, position, rope_base)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if padding_mask is not None:
        q, k, v = (silence(x, padding_mask) for x in (q, k, v))

    def run(
        q: Tensor, k: Tensor, v: Tensor, *, start: Tensor | None = None, valid: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        options = {"scale": scale, "return_entropy": return_entropy}
        if backend == "exact" or q.numel() == 0:
            packed = None if start is None else cu_seqlens
            masks = {"padding_mask": valid, "cu_seqlens": packed}
            return local_attention_exact(q, k, v, window, **masks, **options)  # type: ignore[arg-type]
        masks = {"start": start, "valid": valid}
        return attend(q, k, v, window, **masks, **options, backend=backend)  # type: ignore[arg-type]

    if cu_seqlens is not None and values and q.numel() and _strays(q, k, v):
        # What a sequence may not see it sees times 0, and of NaN that is NaN.
        lengths = cu_seqlens.diff().tolist()
        valid = [None] * len(lengths) if padding_mask is None else padding_mask.split(lengths, 1)
        parts = zip(*(x.split(lengths, 1) for x in (q, k, v)), valid, strict=True)
        found = [run(*x, valid=mask) for *x, mask in parts if x[0].numel()]
        o = torch.cat([x for x, _ in found], 1)
        entropies = [x for _, x in found if x is not None]
        entropy = torch.cat(entropies, 1) if entropies else None
    else:
        o, entropy = run(q, k, v, start=start, valid=padding_mask)
    if padding_mask is not None:
        o = silence(o, padding_mask)
        entropy = None if entropy is None else entropy.masked_fill(~padding_mask[..., None], 0)
    return o, entropy


def check_numbers(q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> None:
    """Under `VORT_DEBUG=1`, refuse NaN and infinity; at padding there may be anything."""
    if not torch.compiler.is_compiling() and debugging():
        given = {"q": q, "k": k, "v": v}
        check_finite({n: x if real is None else silence(x, real) for n, x in given.items()})


def _strays(*tensors: Tensor) -> bool:
    """Whether some number is not finite, where one may look."""
    if traced(tensors[0]) or transformed():
        return False
    sums = (x.detach().sum(dtype=torch.promote_types(x.dtype, torch.float32)) for x in tensors)
    return not all(bool(x.isfinite()) for x in sums)


def silence(x: Tensor, padding_mask: Tensor) -> Tensor:
    """Return `[..., H, D]` with zeros at padding, where there may be anything, even NaN."""
    return x.masked_fill(~padding_mask[..., None, None], 0)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    *,
    scale: float,
    start: Tensor | None = None,
    valid: Tensor | None = None,
    return_entropy: bool = False,
    backend: LocalBackend = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Return what `attend_blockwise` returns, from the backend that suits device and dtype.

    Example:
        >>> q = torch.randn(1, 5, 4, 8)
        >>> attend(q, q, q, window=4, scale=0.5)[0].shape
        torch.Size([1, 5, 4, 8])
    """
    if backend == "auto":
        narrow = max(q.shape[-1], v.shape[-1]) <= WIDEST
        backend = "triton" if narrow and kernels_take(q, k, v) else "block"
    rest = {"scale": scale, "start": start, "valid": valid, "return_entropy": return_entropy}
    if backend == "triton":  # kernels know nothing of autocast
        require_kernels(q.device, "block")
        from .triton import attend_fused  # here and in rope.py alone: Triton may be absent

        return attend_fused(q, k, v, window, **rest)  # type: ignore[arg-type]
    with without_autocast(q):
        return attend_blockwise(q, k, v, window, **rest)  # type: ignore[arg-type]
