"""Maps with nothing to draw or to learn: elu + 1, ReLU, the identity, Taylor's expansion."""

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


def taylor_features(x: Tensor) -> Tensor:
    """Return φ with φ(q)·φ(k) = 1 + s + s²/2 exactly, where s = q·k/sqrt(d).

    Shapes: `[..., d]` to `[..., 1 + d + d (d + 1) / 2]`. Each product of two coordinates is kept
    once: the d squares carry 1/sqrt(2), the pairs i < j carry 1 because each stands for two equal
    terms of s².

    Example:
        >>> q, k = torch.randn(2, 8, dtype=torch.float64)
        >>> s = q @ k / 8**0.5
        >>> torch.allclose(taylor_features(q) @ taylor_features(k), 1 + s + s**2 / 2)
        True
    """
    d = x.shape[-1]
    scaled = x.to(working_dtype(x)) * d**-0.25
    rows, columns = torch.triu_indices(d, d, offset=1, device=x.device)
    constant = torch.ones_like(scaled[..., :1])
    squares = scaled.square() * 0.5**0.5
    pairs = scaled[..., rows] * scaled[..., columns]
    return torch.cat([constant, scaled, squares, pairs], dim=-1).to(x.dtype)


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


class TaylorFeatures(FeatureMap):
    """1 + s + s²/2 for s = q·k/sqrt(head_dim), in 1 + d + d (d + 1) / 2 features.

    Features take either sign but their product does not: 1 + s + s²/2 = (1 + (1 + s)²)/2 >= 1/2.
    """

    is_positive = True

    def __init__(self, head_dim: int) -> None:
        super().__init__(head_dim, 1 + head_dim + head_dim * (head_dim + 1) // 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of `taylor_features`."""
        self.check_input(x)
        return taylor_features(x)
