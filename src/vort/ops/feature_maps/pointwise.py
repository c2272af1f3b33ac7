"""Maps that act on each coordinate alone: elu + 1, ReLU and the identity."""

import torch
from torch import Tensor

from .base import FeatureMap, working_dtype


def elu_features(x: Tensor) -> Tensor:
    """Return elu(x) + 1 = x + 1 for x > 0 and exp(x) otherwise: never zero, shape of `x`.

    Example:
        >>> elu_features(torch.tensor([-1.0, 0.0, 2.0]))
        tensor([0.3679, 1.0000, 3.0000])
    """
    wide = x.to(working_dtype(x))
    # exp directly: `elu(x) + 1` rounds to zero below x = -17 in float32.
    features = torch.where(wide > 0, wide + 1, wide.clamp(max=0).exp())
    return features.to(x.dtype)


def relu_features(x: Tensor) -> Tensor:
    """Return max(x, 0), shape of `x`. A position may come out as all zeros.

    Example:
        >>> relu_features(torch.tensor([-1.0, 0.0, 2.0]))
        tensor([0., 0., 2.])
    """
    return torch.relu(x)


class EluFeatures(FeatureMap):
    """φ(x) = elu(x) + 1, of dimension `head_dim`."""

    is_positive = True

    def __init__(self, head_dim: int) -> None:
        super().__init__(head_dim, head_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return elu(x) + 1."""
        self.check_input(x)
        return elu_features(x)


class ReluFeatures(FeatureMap):
    """φ(x) = max(x, 0), of dimension `head_dim`."""

    is_positive = True

    def __init__(self, head_dim: int) -> None:
        super().__init__(head_dim, head_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return max(x, 0)."""
        self.check_input(x)
        return relu_features(x)


class IdentityFeatures(FeatureMap):
    """φ(x) = x, of dimension `head_dim`; the similarity is q·k and takes either sign."""

    is_positive = False

    def __init__(self, head_dim: int) -> None:
        super().__init__(head_dim, head_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` itself."""
        self.check_input(x)
        return x
