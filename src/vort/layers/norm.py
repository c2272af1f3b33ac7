"""RMS norm whose weight follows the type of its input."""

from torch import Tensor, nn
from torch.nn import functional as F

from vort.ops.rms_norm import rms_norm

__all__ = ["RMSNorm"]


class RMSNorm(nn.RMSNorm):
    """x / rms(x) times a weight; under autocast too in one fused call.

    PyTorch falls back to a slow form when a half-precision input meets a float32 weight.

    >>> import torch
    >>> RMSNorm(8)(torch.ones(2, 8)).shape
    torch.Size([2, 8])
    """

    def forward(self, x: Tensor) -> Tensor:
        """`[..., size]` in and out."""
        if x.shape[-1:] == self.normalized_shape:
            return rms_norm(x, self.weight, self.eps)
        # a norm over several axes, or a size that PyTorch refuses
        weight = None if self.weight is None else self.weight.to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)
