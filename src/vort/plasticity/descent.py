"""Projected gradient descent on a box, and what theorem plasticity says of every run of it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["Descent", "descend"]

Loss = Callable[[Tensor], Tensor]

# A difference of losses below this share of them is rounding, and says nothing of a rate.
_ROUNDING = 1e4 * torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Descent:
    """A run of projected descent, with both sides of the theorem's inequality.

    Attributes:
        order: where it ended, in the shape it began.
        losses: F after 0, 1, ... steps.
        step: η, the smallest step taken; at most 1/smoothness.
        smoothness: L, such that every step's decrease is what an L-smooth F guarantees.
        optimum: F*; where none was given, the lowest loss met, which is F* from above.
        gaps: D at every iterate but the last (see `pl_constants`).
        gradient_norms: |∇F| at every iterate but the last.

    The theorem is about one order inside [δ, 1]. For many orders, clipped to a box, its condition
    |∇F|² >= 2μ (F - F*) does not even give convergence (E18). What does is the same condition on
    what a clipped step can gain (proximal PL, Karimi, Nutini and Schmidt, 2016):

        D = -(2/η) min_y { ∇F·(y - x) + |y - x|²/2η } >= 2μ (F - F*)      y in the box

    D is |∇F|² where nothing is clipped, so inside the interval it is the paper's condition.
    """

    order: Tensor
    losses: list[float]
    step: float
    smoothness: float
    optimum: float
    gaps: list[float] = field(repr=False)
    gradient_norms: list[float] = field(repr=False)

    @property
    def pl_constants(self) -> list[float]:
        """μ_l = D_l / 2(F_l - F*) at each iterate, as far as F_l - F* is more than rounding."""
        return [gap / (2 * excess) for gap, excess in self._resolved(self.gaps)]

    @property
    def printed_pl_constants(self) -> list[float]:
        """The same with |∇F|² for D, as the theorem prints it: on a face of the box no bound."""
        squares = [norm**2 for norm in self.gradient_norms]
        return [square / (2 * excess) for square, excess in self._resolved(squares)]

    @property
    def pl_constant(self) -> float:
        """μ along the path: the least of `pl_constants`, at most 1/η; NaN where none is known."""
        return min((*self.pl_constants, 1 / self.step), default=math.nan)

    @property
    def bound(self) -> list[float]:
        """F* + (1 - ημ)^l (F_0 - F*): what eq. pl-rate allows after l steps."""
        return self.bound_with(self.pl_constant)

    def bound_with(self, pl_constant: float) -> list[float]:
        """The bound with a μ known from elsewhere, as over the whole interval."""
        rate, excess = 1 - self.step * pl_constant, self.losses[0] - self.optimum
        return [self.optimum + rate**count * excess for count in range(len(self.losses))]

    @property
    def rate(self) -> float:
        """Measured factor on F - F* in a step, the geometric mean as far as it can be resolved."""
        begin = self.losses[0] - self.optimum
        last = max(1, len(self._resolved(self.losses)) - 1)
        if begin <= 0:
            return math.nan
        return float((max(self.losses[last] - self.optimum, 0.0) / begin) ** (1 / last))

    def holds(self, pl_constant: float | None = None) -> bool:
        """Whether no loss of the run is above its bound, but for rounding."""
        mu = self.pl_constant if pl_constant is None else pl_constant
        slack = _rounding(self.losses[0])
        pairs = zip(self.losses, self.bound_with(mu), strict=True)
        return all(loss <= limit + slack for loss, limit in pairs)

    def to_dict(self) -> dict[str, Any]:
        """Curve, bound and constants, ready for JSON; the orders are left out."""
        return {
            "losses": self.losses,
            "bound": self.bound,
            "step": self.step,
            "smoothness": self.smoothness,
            "pl_constant": self.pl_constant,
            "optimum": self.optimum,
            "rate": None if math.isnan(self.rate) else self.rate,
            "holds": self.holds(),
        }

    def _resolved(self, gaps: list[float]) -> list[tuple[float, float]]:
        """(gap, F - F*) up to the first iterate where the latter is mere rounding."""
        least = _rounding(self.losses[0])
        found = []
        for gap, loss in zip(gaps, self.losses, strict=False):
            if loss - self.optimum <= least:
                break
            found.append((gap, loss - self.optimum))
        return found


def descend(
    loss: Loss,
    start: Tensor,
    *,
    low: float,
    high: float = 1.0,
    iterations: int = 100,
    smoothness: float | None = None,
    optimum: float | None = None,
) -> Descent:
    """Projected gradient descent x <- clip(x - η ∇F(x), low, high) with η = 1/L.

    Args:
        loss: from a tensor like `start` to a scalar; differentiated by autograd.
        start: where to begin, any shape; computed in float64, given back in its own type, or the
            default one where it has whole numbers.
        low: δ, lower end of the box.
        high: upper end.
        iterations: steps.
        smoothness: L, where it is known. None estimates it: from the change of the gradient over
            a small step, and then doubled whenever a step gains less than L-smoothness promises
            (F(x⁺) <= F(x) + ∇F·(x⁺ - x) + L|x⁺ - x|²/2), so that η <= 1/L along the path.
        optimum: F*, where it is known.

    >>> run = descend(lambda x: (x - 0.3) ** 2, torch.tensor(0.9), low=0.05, iterations=20)
    >>> round(float(run.order), 6), run.holds()
    (0.3, True)
    """
    if not low < high:
        raise ValueError(f"low must be below high = {high:g}, got {low:g}")
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    if smoothness is not None and not 0 < smoothness < math.inf:
        raise ValueError(f"smoothness must be positive and finite, got {smoothness}")
    dtype = start.dtype if start.is_floating_point() else torch.get_default_dtype()
    here = start.detach().to(torch.float64).clamp(low, high)
    value, slope = _evaluate(loss, here)
    curve = smoothness or _first_smoothness(loss, here, slope, low, high)
    losses, gaps, norms = [value], [], []
    for _ in range(iterations):
        while True:
            there = (here - slope / curve).clamp(low, high)
            move = there - here
            model = float((slope * move).sum() + curve * move.square().sum() / 2)
            next_value, next_slope = _evaluate(loss, there)
            if smoothness is not None or next_value <= value + model + _rounding(value) / 100:
                break
            curve *= 2
        gaps.append(-2 * curve * model)
        norms.append(float(slope.norm()))
        here, value, slope = there, next_value, next_slope
        losses.append(value)
    reached = min(losses) if optimum is None else optimum
    return Descent(here.to(dtype), losses, 1 / curve, curve, reached, gaps, norms)


def _evaluate(loss: Loss, at: Tensor) -> tuple[float, Tensor]:
    """F and its gradient."""
    leaf = at.detach().requires_grad_()
    with torch.enable_grad():
        value = loss(leaf)
        if value.numel() != 1:
            raise ValueError(f"loss must give a scalar, got shape {tuple(value.shape)}")
        (slope,) = torch.autograd.grad(value.sum(), leaf)
    found = float(value.detach())
    if not math.isfinite(found) or not bool(torch.isfinite(slope).all()):
        raise FloatingPointError(f"loss and its gradient must be finite, got a loss of {found}")
    return found, slope.detach()


def _rounding(loss: float) -> float:
    return _ROUNDING * (1 + abs(loss))


def _first_smoothness(loss: Loss, at: Tensor, slope: Tensor, low: float, high: float) -> float:
    """|∇F(y) - ∇F(x)| / |y - x| for a y a little downhill."""
    largest = float(slope.abs().max())
    if largest == 0:
        return 1.0
    near = (at - slope * (1e-3 * (high - low) / largest)).clamp(low, high)
    moved = float((near - at).norm())
    if moved == 0:
        return largest / (high - low)
    _, other = _evaluate(loss, near)
    return max(float((other - slope).norm()) / moved, 1e-12)
