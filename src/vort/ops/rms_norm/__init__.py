"""RMS norm over the last axis: PyTorch's, or on a GPU kernels that suit short rows.

PyTorch gives every row a block of threads of its own, most of which find nothing to do in a row of
one head's 64 numbers; a program of `triton.py` takes many rows. On a CPU much of x is taken a block
at a time by `block.py`, with the same result to the bit.
"""

from torch import Tensor
from torch.nn import functional as F

from vort.ops.gpu.launcher import kernels_take
from vort.ops.rms_norm.block import fits, rms_norm_in_blocks

__all__ = ["rms_norm"]

# Longer rows fill PyTorch's block of threads by themselves.
LONGEST = 1024


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float | None = 1e-6) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight, in the type of `x` whatever autocast says.

    Shapes: x `[..., D]`, weight `[D]` or None. The kernels multiply by the weight before they
    round; PyTorch is given the weight in the type of `x`, since it is slow otherwise.

    Example:
        >>> import torch
        >>> y = rms_norm(torch.full((2, 4), 3.0), torch.full((4,), 0.5))
        >>> torch.allclose(y, torch.full((2, 4), 0.5))
        True
    """
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight must have the shape of x's last axis, {list(x.shape[-1:])}, "
            f"got {list(weight.shape)}"
        )
    if eps is not None and _fused(x, weight):
        from .triton import rms_norm_fused

        return rms_norm_fused(x, weight, eps)
    if eps is not None and weight is not None and fits(x, weight):
        return rms_norm_in_blocks(x, weight, eps)
    return F.rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x.dtype), eps)


def _fused(x: Tensor, weight: Tensor | None) -> bool:
    """Whether kernels can do it; the weight may be of another type than x."""
    if weight is not None and not (weight.device == x.device and kernels_take(weight)):
        return False
    return kernels_take(x) and x.ndim > 0 and 0 < x.shape[-1] <= LONGEST
