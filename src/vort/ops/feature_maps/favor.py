"""FAVOR+: positive random features for the softmax similarity exp(q·k/sqrt(d)).

With x = q / d^(1/4) and rows w_i ~ N(0, I) of a random projection,

    φ_i(x) = exp(w_i·x - |x|²/2) / sqrt(m),      E φ(q)·φ(k) = exp(q·k/sqrt(d)).

Keeping this inside float32 is usually done by subtracting the largest exponent over the whole
sequence, which lets the future reach the past. What is sound instead:

* A query may be divided by anything of its own: the factor stands in numerator and denominator
  alike. `map_query` takes the largest exponent of each position off, so its largest feature is
  1/sqrt(m). Without a normaliser nothing cancels, and `forward` is the map to use.
* A key may not: its factor is its weight among the keys. Only bounds that look at one position,
  the same at all positions, are causal and leave ordinary keys as they are. Two are used, on
  queries and keys alike:
    - |x| is cut at `max_norm`. A vector longer than about 2 sqrt(2 log m) has w_i·x < |x|²/2 for
      every typical w_i: its features all fade to zero, and the key is lost whatever the query is.
      Cutting the length keeps the direction and a live feature. Nothing of value is lost there:
      the estimate's relative variance, exp(|q + k|²)/m after scaling, exceeded any m long before.
    - The exponent, which never exceeds |w_i|²/2 (complete the square), stops at `CEILING`: for
      large d that bound alone is beyond float32. Products of two features, summed over a million
      positions, stay finite.

Below both bounds the features are FAVOR+'s own and the estimate is unbiased.

The constant that a normaliser adds to its denominator must lie far below the products φ(q)·φ(k).
Twice the length that an RMS norm leaves (d = 64, m = 64) brings typical products below 1e-6, and
a constant of 1e-6 then erases the answer; 1e-20 does not, and float32 holds both.
"""

import math
from typing import Any

import torch
from torch import Tensor

from vort.ops.custom import without_autocast

from .base import FeatureMap, kernels_fit, working_dtype

# A third of float32's exponent range: two features and a sum over many positions fit in it.
CEILING = 29.0


def draw_projection(
    num_features: int,
    head_dim: int,
    *,
    orthogonal: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return a random projection `[num_features, head_dim]`, every row distributed as N(0, I).

    With `orthogonal`, rows within each block of `head_dim` are orthogonal to each other, which
    lowers the variance of the estimate and leaves its mean alone. Drawn on the CPU in float64, so
    that one seed gives one projection on every device.

    Example:
        >>> w = draw_projection(8, 8, generator=torch.Generator().manual_seed(0))
        >>> gram = w @ w.T
        >>> torch.allclose(gram, gram.diagonal().diag(), atol=1e-5)
        True
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, device="cpu", generator=generator)

    if not orthogonal:
        return normal(num_features, head_dim).float()
    blocks = -(-num_features // head_dim)
    q, r = torch.linalg.qr(normal(blocks, head_dim, head_dim))
    # QR fixes signs by convention; undoing that makes the directions uniform (Haar).
    directions = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    directions = directions.mT.reshape(blocks * head_dim, head_dim)[:num_features]
    lengths = torch.linalg.vector_norm(normal(num_features, head_dim), dim=-1, keepdim=True)
    rows: Tensor = directions * lengths
    return rows.float()


def favor_features(
    x: Tensor,
    projection: Tensor,
    *,
    max_norm: float | None = 6.0,
    shift_by_position: bool = False,
) -> Tensor:
    """Return positive random features whose products estimate exp(q·k/sqrt(d)).

    Shapes: x `[..., d]`, projection `[m, d]`; the result is `[..., m]`.

    Computed in float32 (float64 for float64 inputs) and returned in the type of x. On a GPU fused
    kernels do it; where x is bfloat16 they take the projection to 16 bits, in float32 sums.

    Args:
        x: queries or keys.
        projection: from `draw_projection`.
        max_norm: longest allowed |x|/d^(1/4); longer vectors are shortened to it. None: no limit.
        shift_by_position: divide each position by its largest feature. For queries that a
            normaliser follows; it would change the weight of a key.

    Example:
        >>> q, k = torch.randn(2, 16, generator=torch.Generator().manual_seed(0)) / 2
        >>> w = draw_projection(4096, 16, generator=torch.Generator().manual_seed(1))
        >>> estimate = favor_features(q, w) @ favor_features(k, w)
        >>> bool((estimate / (q @ k / 4).exp() - 1).abs() < 0.1)
        True
    """
    features, d = projection.shape
    ceiling = min(CEILING, math.log(torch.finfo(x.dtype).max) / 3)
    # the kernels give the projection no gradient
    if not projection.requires_grad and kernels_fit(x, projection, d, features):
        from .triton import favor_fused

        return favor_fused(
            x, projection, max_norm=max_norm, shift=shift_by_position, ceiling=ceiling
        )
    dtype = working_dtype(x)
    with without_autocast(x):
        scaled = x.to(dtype) * d**-0.25
        if max_norm is not None:
            # Cut as a square: the norm of a zero vector, as padding is, has no second derivative.
            square = scaled.square().sum(-1, keepdim=True)
            scaled = scaled * (max_norm / square.clamp(min=max_norm**2).sqrt())
        exponent = scaled @ projection.to(dtype).mT - scaled.square().sum(-1, keepdim=True) / 2
        if shift_by_position:
            exponent = exponent - exponent.amax(-1, keepdim=True)
        result: Tensor = exponent.clamp(max=ceiling).exp() / math.sqrt(features)
    return result.to(x.dtype)


class FavorFeatures(FeatureMap):
    """FAVOR+ with its projection as a saved buffer; `redraw` replaces the projection.

    Args:
        head_dim: size of the last axis coming in.
        num_features: output dimension; head_dim by default.
        orthogonal: rows of the projection orthogonal within blocks of head_dim.
        max_norm: see `favor_features`.
        generator: a CPU generator; the same seed gives the same features.
    """

    is_positive = True
    projection: Tensor

    def __init__(
        self,
        head_dim: int,
        num_features: int | None = None,
        *,
        orthogonal: bool = True,
        max_norm: float | None = 6.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(head_dim, head_dim if num_features is None else num_features)
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm must be positive or None, got {max_norm}")
        self.orthogonal = orthogonal
        self.max_norm = max_norm
        drawn = self._draw(generator)
        # Built on the meta device, it is there like everything else, to be drawn when it leaves.
        built_on_meta = torch.empty(0).is_meta
        self.drawn = not built_on_meta
        self.register_buffer("projection", drawn.to("meta") if built_on_meta else drawn)

    def _apply(self, fn: Any, recurse: bool = True) -> "FavorFeatures":
        """As for every module; a projection that leaves the meta device is drawn."""
        was_meta = self.projection.is_meta
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if was_meta and not self.projection.is_meta:
            self.redraw()
        return self

    def reset_parameters(self) -> None:
        """Draw the projection where it has never been: made on the meta device, and not loaded."""
        if not self.drawn:
            self.redraw()

    def _draw(self, generator: torch.Generator | None) -> Tensor:
        return draw_projection(
            self.output_dim, self.head_dim, orthogonal=self.orthogonal, generator=generator
        )

    @torch.no_grad()
    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw a new projection in place.

        Call it between training steps: within one, gradient checkpointing would recompute with
        other features than it ran with. A memory filled under the old projection is void.
        """
        self.projection.copy_(self._draw(generator))
        self.drawn = not self.projection.is_meta

    def forward(self, x: Tensor) -> Tensor:
        """Return the features; products of two estimate exp(q·k/sqrt(head_dim))."""
        self.check_input(x)
        return favor_features(x, self.projection, max_norm=self.max_norm)

    def map_query(self, x: Tensor) -> Tensor:
        """Return the features of each query divided by its largest one, which is then 1/sqrt(m)."""
        self.check_input(x)
        return favor_features(x, self.projection, max_norm=self.max_norm, shift_by_position=True)
