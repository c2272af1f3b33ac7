"""The small parts of a layer: RMS norm, and a causal convolution over the last few positions."""

import torch
from torch import Tensor, nn

from vort.ops.linear import Norm
from vort.ops.rms_norm import rms_norm
from vort.ops.short_convolution import short_convolution

__all__ = ["RMSNorm", "ShortConvolution"]


class RMSNorm(nn.RMSNorm):
    """x / rms(x) times a weight; under autocast too in one fused call.

    PyTorch falls back to a slow form when a half-precision input meets a float32 weight.

    >>> RMSNorm(8)(torch.ones(2, 8)).shape
    torch.Size([2, 8])
    """

    def forward(self, x: Tensor) -> Tensor:
        """`[..., size]` in and out."""
        return rms_norm(x, self.weight, self.eps)

    def fused(self) -> Norm:
        """The same for an op that takes the norm before its products."""
        # without an eps of its own PyTorch takes that of the input's type: of float32 here
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        return Norm(self.weight, eps)


class ShortConvolution(nn.Module):
    """silu(Σ_j weight[:, j] x_{t-j}) for j < size: lets a key carry what stood just before it.

    Shapes: `[B, T, channels]` in and out. The state is the last `size - 1` inputs,
    `[B, size - 1, channels]`.

    >>> convolution = ShortConvolution(channels=8, size=4)
    >>> y, state = convolution(torch.randn(2, 5, 8), output_state=True)
    >>> y.shape, state.shape
    (torch.Size([2, 5, 8]), torch.Size([2, 3, 8]))
    """

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        if size < 2:
            raise ValueError(f"size must be at least 2 positions, got {size}")
        self.channels = channels
        self.size = size
        self.weight = nn.Parameter(torch.empty(channels, size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in ±1/sqrt(size), as PyTorch draws a convolution of this fan-in."""
        bound = self.size**-0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        output_state: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Convolved `x` `[B, T, channels]`, and the state after it; see `short_convolution`."""
        options = {"lengths": lengths, "cu_seqlens": cu_seqlens, "output_state": output_state}
        return short_convolution(x, self.weight, state, **options)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        """The two sizes."""
        return f"channels={self.channels}, size={self.size}"
