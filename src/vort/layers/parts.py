"""The small parts of a layer: RMS norm, and a causal convolution over the last few positions."""

import torch
from torch import Tensor, nn

from vort.ops.padding import keep_last
from vort.ops.rms_norm import rms_norm

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
        """Convolved `x`, and the state after it if asked for.

        Args:
            x: `[B, T, channels]`, zero at padding.
            state: what a former call returned; without it nothing comes before `x`.
            lengths: `[B]` real positions at the front of each row; all of them by default.
            cu_seqlens: `[N + 1]` bounds of packed sequences, B = 1; not together with a state.
            output_state: whether to return the state.
        """
        batch, length, channels = x.shape
        past = x.new_zeros(batch, self.size - 1, channels) if state is None else state.to(x.dtype)
        padded = torch.cat([past, x], 1)
        weight = self.weight.to(x.dtype)
        age = None if cu_seqlens is None else _position_in_sequence(cu_seqlens, length)
        y = x * weight[:, 0]
        for lag in range(1, self.size):
            earlier = padded[:, self.size - 1 - lag : self.size - 1 - lag + length]
            if age is not None:
                earlier = earlier.masked_fill((age < lag)[:, None], 0)
            y = y + earlier * weight[:, lag]
        after = keep_last(past, x, lengths) if output_state else None
        return nn.functional.silu(y), after

    def extra_repr(self) -> str:
        """The two sizes."""
        return f"channels={self.channels}, size={self.size}"


def _position_in_sequence(cu_seqlens: Tensor, length: int) -> Tensor:
    """`[T]`: how many positions of its own packed sequence come before each."""
    position = torch.arange(length, device=cu_seqlens.device)
    start = cu_seqlens[torch.searchsorted(cu_seqlens, position, right=True) - 1]
    return position - start
