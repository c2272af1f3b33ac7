"""The small parts of a block: RMS norm, a causal convolution over few positions, a gated MLP."""

import torch
from torch import Tensor, nn

from vort.ops.asked import Asked, linear_of_asked
from vort.ops.linear import Norm, gated_mlp, is_plain
from vort.ops.rms_norm import rms_norm
from vort.ops.short_convolution import short_convolution

__all__ = ["RMSNorm", "ShortConvolution", "VortMLP"]


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


class VortMLP(nn.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, width, bias=False)
        self.up_proj = nn.Linear(size, width, bias=False)
        self.down_proj = nn.Linear(width, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden_size]` in and out."""
        if is_plain(x, self.gate_proj, self.up_proj, self.down_proj):
            return self.after_norm(None, x, None)[1]
        result: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return result

    def after_norm(
        self, norm: RMSNorm | None, x: Tensor, delta: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """x + delta, and what `forward` makes of its norm, past the projections themselves."""
        first = None if norm is None else norm.fused()
        weights = (self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)
        return gated_mlp(x, *weights, delta=delta, norm=first)

    def of_asked(self, x: Tensor, asked: Asked) -> Tensor:
        """`forward` of positions that `vort.ops.asked.pick` picked, past the projections."""
        weights = (self.gate_proj.weight, self.up_proj.weight)
        gate, up = (linear_of_asked(x, weight, asked) for weight in weights)
        return linear_of_asked(nn.functional.silu(gate) * up, self.down_proj.weight, asked)

    def step(self, norm: Norm, x: Tensor) -> Tensor:
        """x + `forward` of its norm, for the few rows of a step of decoding."""
        from vort.ops.linear.few import few_gated, few_products

        inner = few_gated(x, self.gate_proj.weight, self.up_proj.weight, norm=norm)
        return few_products(inner, self.down_proj.weight, residual=x)
