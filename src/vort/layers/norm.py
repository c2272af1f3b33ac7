"""RMS norm whose weight follows the type of its input."""

from torch import Tensor, nn

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
        return rms_norm(x, self.weight, self.eps)
