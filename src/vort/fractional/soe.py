"""A sum of exponentials, and how far it is from the GL kernel of one order."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vort.fractional.gl import gl_weights

Array = NDArray[np.float64]

# Lags evaluated at once: bounds the memory of [lags, terms] at long horizons.
_BLOCK = 1 << 16


@dataclass(frozen=True)
class SumOfExponentials:
    """ŵ_j = Σ_s weights[s] e^{-rates[s] j} for one order (eq. soe-def).

    Attributes:
        rates: `[S]`, ascending, >= 0.
        weights: `[S]`, >= 0.
    """

    rates: Array
    weights: Array

    @property
    def terms(self) -> int:
        """How many exponentials, and so how many recurrent states."""
        return len(self.rates)

    def kernel(self, lags: ArrayLike) -> Array:
        """ŵ at each lag, any shape."""
        values = np.asarray(lags, dtype=np.float64)
        flat = values.reshape(-1)
        blocks = [
            np.exp(-flat[start : start + _BLOCK, None] * self.rates) @ self.weights
            for start in range(0, flat.size, _BLOCK)
        ]
        return np.concatenate(blocks or [flat]).reshape(values.shape)

    def errors(self, order: float, horizon: int) -> tuple[Array, Array]:
        """(absolute, relative) error against the GL weights at every lag 0 ... horizon."""
        exact = gl_weights(order, horizon).numpy()
        absolute = np.abs(self.kernel(np.arange(horizon + 1)) - exact)
        return absolute, absolute / exact
