"""What every feature map offers, the precision all of them compute in, what kernels can take."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from vort.ops.asked import Asked, pick
from vort.ops.gpu.launcher import kernels_take

# The most coordinates, and the most columns of a weight, that the kernels hold in registers.
WIDEST = 256


def working_dtype(x: Tensor) -> torch.dtype:
    """Return the type a map computes in: float64 stays, everything narrower becomes float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def kernels_fit(x: Tensor, matrix: Tensor, head_dim: int, columns: int) -> bool:
    """Whether kernels can map x `[..., head_dim]` through a matrix that has `columns` features.

    What does not fit together goes to PyTorch, which says so better.
    """
    fitting = 1 <= head_dim <= WIDEST and 1 <= columns <= WIDEST and x.shape[-1] == head_dim
    return fitting and matrix.device == x.device and kernels_take(x)


class FeatureMap(nn.Module, ABC):
    """Maps `[..., head_dim]` to `[..., output_dim]`, each position by itself, hence causally.

    Attributes:
        head_dim: size of the last axis coming in.
        output_dim: size of the last axis going out.
        is_positive: whether φ(q)·φ(k) >= 0 for all q and k, so that a normaliser made of such
            products and positive weights cannot change sign.

    Features are computed in float32 (float64 for float64 inputs) and returned in the input's type.
    """

    is_positive: ClassVar[bool]

    def __init__(self, head_dim: int, output_dim: int) -> None:
        super().__init__()
        if head_dim < 1:
            raise ValueError(f"head_dim must be at least 1, got {head_dim}")
        if output_dim < 1:
            raise ValueError(f"num_features must be at least 1, got {output_dim}")
        self.head_dim = head_dim
        self.output_dim = output_dim

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Return the features of `x`, the same for a query and for a key."""

    def map_query(self, x: Tensor) -> Tensor:
        """Return the features of queries, up to one positive factor for each position.

        A normaliser cancels that factor, so a map may choose it for its numerical range. Without
        a normaliser use `forward` for queries too.
        """
        features: Tensor = self(x)
        return features

    def map_asked(self, x: Tensor, asked: Asked, *, normalized: bool) -> Tensor:
        """Return the features of queries `[B, T, H, head_dim]` that are asked for, `[rows, H, .]`.

        x: of all, or of those that are asked for.
        normalized: whether a normaliser follows, see `map_query`.
        """
        picked = x if x.ndim == 3 else pick(x, asked)
        features: Tensor = self.map_query(picked) if normalized else self(picked)
        return features

    def check_input(self, x: Tensor) -> None:
        """Raise a ValueError if the last axis of `x` is not `head_dim` long."""
        if x.ndim < 1 or x.shape[-1] != self.head_dim:
            raise ValueError(
                f"x must have a last axis of head_dim={self.head_dim}, got shape {tuple(x.shape)}"
            )

    def extra_repr(self) -> str:
        """Return the two dimensions for `repr`."""
        return f"head_dim={self.head_dim}, output_dim={self.output_dim}"
