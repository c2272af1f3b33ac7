"""A sum of exponentials, how far it is from the GL kernel of one order, and its plain memory."""

from collections.abc import Sequence
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

    def states(self, values: ArrayLike) -> Array:
        """M^(s)_t = λ_s M^(s)_{t-1} + c_s v_t after every token: `[T, S, V]` of values `[T, V]`.

        Eq. aux-recurrence, the memory without keys. Summed over s it is M̂_t = Σ_i ŵ_{t-i} v_i.

        >>> SumOfExponentials(np.zeros(1), np.ones(1)).states(np.ones((3, 1))).ravel().tolist()
        [1.0, 2.0, 3.0]
        """
        tokens = np.asarray(values, dtype=np.float64)
        decays = np.exp(-self.rates)[:, None]
        found = np.empty((len(tokens), self.terms, tokens.shape[1]))
        state = np.zeros(found.shape[1:])
        for t, value in enumerate(tokens):
            state = decays * state + self.weights[:, None] * value
            found[t] = state
        return found


def bank_memories(
    rules: Sequence[SumOfExponentials], chosen: ArrayLike, values: ArrayLike
) -> Array:
    """M^(k)_t after every token (eq. bank-update): `[T, K, V]` of values `[T, V]`.

    Args:
        rules: one for each bank, of the bank's order.
        chosen: `[T]`, the bank 0 ... K - 1 that each token is written to; the others only age.
        values: of the tokens.
    """
    tokens, each = np.asarray(values, dtype=np.float64), np.asarray(chosen)
    if tokens.ndim != 2 or each.shape != tokens.shape[:1]:
        raise ValueError(
            f"values and chosen must be [T, V] and [T], got shapes {tokens.shape} and {each.shape}"
        )
    unknown = ~np.isin(each, np.arange(len(rules)))
    if unknown.any():
        raise ValueError(
            f"chosen must be banks 0 ... {len(rules) - 1}, got {each[unknown][0]} "
            f"at index {unknown.argmax()}"
        )
    banks = each[:, None]
    parts = [rule.states(tokens * (banks == k)).sum(1) for k, rule in enumerate(rules)]
    return np.stack(parts, 1)
