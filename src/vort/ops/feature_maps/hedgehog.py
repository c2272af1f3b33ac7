"""A learned softmax map after Hedgehog: φ(x) = [softmax(W x), softmax(-W x)]."""

import torch
from torch import Tensor, nn

from vort.ops.asked import Asked, heads_of_asked, pick
from vort.ops.custom import without_autocast

from .base import FeatureMap, kernels_fit, working_dtype


def hedgehog_features(x: Tensor, weight: Tensor) -> Tensor:
    """Return [softmax(W x), softmax(-W x)], each half summing to one.

    Shapes: x `[..., d]` with weight `[d, m]`, or x `[..., H, d]` with weight `[H, d, m]`; the
    result is `[..., 2 m]`.

    Computed in float32 (float64 for float64 inputs) and returned in the type of x. On a GPU fused
    kernels do it; where x is bfloat16 they take the weight to 16 bits, in float32 sums.

    Example:
        >>> hedgehog_features(torch.zeros(3, 4), torch.eye(4)).shape
        torch.Size([3, 8])
    """
    if _fused(x, weight):
        from .triton import hedgehog_fused

        return hedgehog_fused(x, weight)
    with without_autocast(x):
        return _softmaxes(_logits(x, weight)).to(x.dtype)


def _logits(x: Tensor, weight: Tensor) -> Tensor:
    dtype = working_dtype(x)
    x, weight = x.to(dtype), weight.to(dtype)
    return x @ weight if weight.ndim == 2 else torch.einsum("...hd,hdm->...hm", x, weight)


def _softmaxes(logits: Tensor) -> Tensor:
    return torch.cat([logits.softmax(-1), (-logits).softmax(-1)], dim=-1)


def _fused(x: Tensor, weight: Tensor) -> bool:
    """Whether kernels can do it: on a GPU, with a head of x for each head of the weight."""
    heads = weight.shape[:-2]
    known = len(heads) == 0 or (len(heads) == 1 and x.shape[-2:-1] == heads)
    return known and kernels_fit(x, weight, *weight.shape[-2:])


class HedgehogFeatures(FeatureMap):
    """The learned softmax map, one weight matrix for all heads or one for each.

    Queries and keys may share a map or own one each: make two modules for the latter.

    Args:
        head_dim: size of the last axis coming in.
        num_features: output dimension, even; 2 * head_dim by default.
        num_heads: with it every head has its own weights and inputs are `[..., num_heads, d]`.
    """

    is_positive = True

    def __init__(
        self, head_dim: int, num_features: int | None = None, *, num_heads: int | None = None
    ) -> None:
        super().__init__(head_dim, 2 * head_dim if num_features is None else num_features)
        if self.output_dim % 2:
            raise ValueError(f"num_features must be even for 'hedgehog', got {num_features}")
        if num_heads is not None and num_heads < 1:
            raise ValueError(f"num_heads must be at least 1, got {num_heads}")
        self.num_heads = num_heads
        heads = () if num_heads is None else (num_heads,)
        self.weight = nn.Parameter(torch.empty(*heads, head_dim, self.output_dim // 2))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start from the identity: at first the map is a softmax of the coordinates themselves."""
        rows, columns = self.weight.shape[-2:]
        # More columns than coordinates: the identity again, so that no feature starts dead.
        eye = torch.eye(rows, dtype=self.weight.dtype, device=self.weight.device)
        self.weight.copy_(eye.repeat(1, -(-columns // rows))[:, :columns])
        if columns > rows:
            # Equal columns would receive equal gradients for ever; a little noise parts them.
            self.weight.add_(0.02 * torch.randn_like(self.weight))

    def forward(self, x: Tensor) -> Tensor:
        """Return [softmax(W x), softmax(-W x)]."""
        self._check(x)
        return hedgehog_features(x, self.weight)

    def map_asked(self, x: Tensor, asked: Asked, *, normalized: bool) -> Tensor:
        """Picked where the product is there: the gradient of the weight is that of all."""
        self._check(x)
        with without_autocast(x):
            if x.ndim == 3:
                dtype = working_dtype(x)
                logits = heads_of_asked(x.to(dtype), self.weight.to(dtype), asked)
            else:
                logits = pick(_logits(x, self.weight), asked)
            return _softmaxes(logits).to(x.dtype)

    def _check(self, x: Tensor) -> None:
        self.check_input(x)
        if self.num_heads is not None and (x.ndim < 2 or x.shape[-2] != self.num_heads):
            raise ValueError(
                f"x must be [..., {self.num_heads}, {self.head_dim}], got shape {tuple(x.shape)}"
            )
