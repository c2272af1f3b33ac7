"""One set of decay rates for the power-law kernels of every order: the shared-rate basis."""

import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vort.files import write_atomically
from vort.fractional._checks import (
    as_order,
    check_at_least,
    check_open_unit,
    check_order,
    looks_at_values,
)
from vort.fractional.basis_fit import expected_error, fit_rates_and_polynomials
from vort.fractional.certificate import Certificate, certify

Array = NDArray[np.float64]

MAX_TERMS = 64
# What quartic weights reach, whatever the number of terms; float32 states hold no more anyway.
FINEST_TOLERANCE = 5e-6
_SHIPPED = "bases.json"


@dataclass(frozen=True, eq=False)
class PowerLawBasis:
    """w_j(order) ≈ Σ_s weights(order)[s] e^{-rates[s] j} for all orders, with the same rates.

    Only the weights depend on the order, so S recurrent states serve tokens of every order at
    once. Weights are positive, smooth in the order, and exact at order 1:

        c_0(a) = sinc(1-a) exp((1-a) p_0(a))       rate 0: the mass below the slowest rate
        c_s(a) = sin(πa)/π exp(p_s(a))             nodes of the Laplace density
        c_S(a) = sin(πa)/(πa) exp(p_S(a))          the fastest: the mass above its neighbour

    Attributes:
        rates: `[S]`, the first 0, ascending up to the last, whose weights have a form of their own:
            it is the fastest but where there are more terms than the horizon takes.
        polynomials: `[S, degree + 1]`, coefficients of p_s in powers of the order.
        horizon: the largest lag the basis is made for.
        order_min: the lowest order it is made for.
        certificate: worst errors over all orders and lags, and how they were established.

    >>> basis = PowerLawBasis.fit(horizon=1000, terms=8)
    >>> basis.weights(torch.tensor([0.3, 1.0])).shape
    torch.Size([2, 8])
    >>> basis.certificate.relative < 4.5e-3
    True
    """

    rates: Array
    polynomials: Array
    horizon: int
    order_min: float
    certificate: Certificate
    _cache: dict[Any, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @classmethod
    def fit(
        cls,
        horizon: int,
        terms: int | None = None,
        tolerance: float | None = None,
        order_min: float = 0.05,
        *,
        use_shipped: bool = True,
    ) -> "PowerLawBasis":
        """The basis with `terms` exponentials, or the smallest one certified to `tolerance`.

        Args:
            horizon: the largest lag, >= 1.
            terms: number of exponentials, 1 to 64; a warning says where fewer do better.
            tolerance: bound on the relative error, >= 5e-6; give this or `terms`, not both.
            order_min: lowest order to serve, in (0, 1).
            use_shipped: take the stored result where this fit comes with the package.
        """
        horizon = check_at_least(horizon, 1, "horizon")
        order_min = check_open_unit(order_min, "order_min")
        if (terms is None) == (tolerance is None):
            raise ValueError(
                f"give either terms or tolerance, got terms={terms!r} and tolerance={tolerance!r}"
            )
        if tolerance is not None:
            tolerance = check_open_unit(tolerance, "tolerance")
            if tolerance < FINEST_TOLERANCE:
                raise ValueError(_unreachable(tolerance, horizon, order_min))
            return _fewest_terms(cls, horizon, tolerance, order_min, use_shipped)
        terms = check_at_least(terms, 1, "terms")
        if terms > MAX_TERMS:
            raise ValueError(f"terms must be at most {MAX_TERMS}, got {terms}")
        basis = _of_terms(cls, horizon, terms, order_min, use_shipped)
        # No shipped one is beaten; and it comes at once, where fewer terms would have to be fitted.
        if not (use_shipped and (horizon, terms, order_min) in shipped_bases()):
            _warn_if_fewer_do_better(basis, use_shipped)
        return basis

    @property
    def terms(self) -> int:
        """Number of exponentials, and so of recurrent states."""
        return len(self.rates)

    @property
    def log_decay(self) -> Tensor:
        """Log of each state's decay per step, `[S]` float32, <= 0: what `retention` takes."""
        return torch.from_numpy(-self.rates).to(torch.float32)

    def log_decay_on(self, device: torch.device) -> Tensor:
        """`log_decay` on a device, kept there for the next call: not to be written to."""
        # Detached: whoever asks for its gradient asks for no one else's.
        return self._tensors(device, torch.float32)[2].detach()

    def weights(self, order: Any, *, validate: bool | None = None) -> Tensor:
        """Weight of each exponential for each order, `[...] -> [..., S]`. Differentiable, >= 0.

        Args:
            order: number or tensor with values in [order_min, 1].
            validate: check the values; by default only where that costs no synchronisation.

        Returns:
            float64 for float64 orders, else float32 (half precision would cost the kernel its
            shape), on the device of `order`.
        """
        value = order if isinstance(order, Tensor) else torch.as_tensor(order, dtype=torch.float64)
        if validate is None:
            validate = looks_at_values(value)
        if validate:
            check_order(as_order(value), low=self.order_min * (1 - 1e-6))
        value = value if value.dtype == torch.float64 else value.to(torch.float32)
        return _weights(value, self._tensors(value.device, value.dtype)[1])

    def polynomials_on(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """`polynomials` as a tensor `[S, degree + 1]` on a device, kept there for the next call.

        Its columns are dense, as kernels read them: all scales' coefficients of one power.
        """
        return self._tensors(device, dtype)[1]

    def kernel(self, order: Any, lags: Any) -> Tensor:
        """The approximate GL weight for broadcast `order` and `lags`, in the dtype of `weights`."""
        weights = self.weights(order)
        rates = self._tensors(weights.device, weights.dtype)[0]
        lag = torch.as_tensor(lags, device=weights.device).to(weights.dtype)
        return (weights * torch.exp(-rates * lag[..., None])).sum(-1)

    def save(self, path: str | Path) -> None:
        """Write the basis as `.json` or `.safetensors`."""
        target = Path(path)
        if target.suffix == ".json":
            write_atomically(target, json.dumps(self.to_dict(), indent=1) + "\n")
        elif target.suffix == ".safetensors":
            _save_safetensors(self, target)
        else:
            raise ValueError(f"path must end in .json or .safetensors, got {str(path)!r}")

    @classmethod
    def load(cls, path: str | Path) -> "PowerLawBasis":
        """Read a basis that `save` wrote."""
        source = Path(path)
        if source.suffix == ".json":
            return cls.from_dict(json.loads(source.read_text()))
        if source.suffix == ".safetensors":
            return cls.from_dict(_load_safetensors(source))
        raise ValueError(f"path must end in .json or .safetensors, got {str(path)!r}")

    def to_dict(self) -> dict[str, Any]:
        """Everything that defines the basis, in plain JSON types."""
        return {
            "horizon": self.horizon,
            "order_min": self.order_min,
            "rates": self.rates.tolist(),
            "polynomials": self.polynomials.tolist(),
            "certificate": asdict(self.certificate),
        }

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> "PowerLawBasis":
        """The inverse of `to_dict`; unknown or missing keys are an error."""
        expected = {"horizon", "order_min", "rates", "polynomials", "certificate"}
        if set(entry) != expected:
            odd = sorted(set(entry) ^ expected)
            raise ValueError(f"a basis has the keys {sorted(expected)}, these differ: {odd}")
        rates = np.asarray(entry["rates"], dtype=np.float64)
        polynomials = np.asarray(entry["polynomials"], dtype=np.float64)
        if rates.ndim != 1 or polynomials.ndim != 2 or len(rates) != len(polynomials):
            raise ValueError(
                f"rates and polynomials must be [S] and [S, degree + 1], "
                f"got shapes {rates.shape} and {polynomials.shape}"
            )
        bad = ~(np.isfinite(rates) & (rates >= 0))
        if bad.any():
            raise ValueError(f"rates must be >= 0 and finite, got {rates[bad][0]:g}")
        if not np.isfinite(polynomials).all():
            odd = polynomials[~np.isfinite(polynomials)][0]
            raise ValueError(f"polynomials must be finite, got {odd:g}")
        horizon = check_at_least(entry["horizon"], 1, "horizon")
        order_min = check_open_unit(entry["order_min"], "order_min")
        certificate = Certificate(**entry["certificate"])
        return cls(rates, polynomials, horizon, order_min, certificate)

    def _tensors(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """(rates, polynomials, -rates) on a device, kept for the next call."""
        key = (device, dtype)
        if key in self._cache:
            return self._cache[key]
        # training may follow, which cannot use what inference mode has made
        with torch.inference_mode(False):
            made = (
                torch.from_numpy(self.rates.copy()).to(device, dtype),
                torch.from_numpy(self.polynomials.T.copy()).to(device, dtype).T,
                torch.from_numpy(-self.rates).to(device, dtype),
            )
        # An export sees tensors without numbers: nothing for the next call.
        if type(made[0]) is Tensor:
            self._cache[key] = made
        return made


@lru_cache(maxsize=1)
def shipped_bases() -> Mapping[tuple[int, int, float], PowerLawBasis]:
    """The bases that come with the package, by (horizon, terms, order_min)."""
    source = resources.files("vort.fractional").joinpath(_SHIPPED)
    if not source.is_file():
        return {}
    loaded = [PowerLawBasis.from_dict(entry) for entry in json.loads(source.read_text())]
    for basis in loaded:  # one for the whole process
        basis.rates.setflags(write=False)
        basis.polynomials.setflags(write=False)
    return {(basis.horizon, basis.terms, basis.order_min): basis for basis in loaded}


def _weights(order: Tensor, polynomials: Tensor) -> Tensor:
    """The closed forms of the class docstring, `[...] -> [..., S]`."""
    terms = polynomials.shape[0]
    a = order[..., None]
    exponent = torch.zeros_like(a)
    for coefficients in reversed(polynomials.unbind(-1)):
        exponent = exponent * a + coefficients
    # sin(π(1-a)), not sin(πa): exactly 0 at order 1.
    inner = torch.sin(math.pi * (1 - a)) / math.pi
    parts = [_sinc(1 - a) * torch.exp((1 - a) * exponent[..., :1])]
    if terms > 2:
        parts.append(inner * torch.exp(exponent[..., 1:-1]))
    if terms > 1:
        parts.append(inner / a * torch.exp(exponent[..., -1:]))
    return torch.cat(parts, -1)


def _sinc(x: Tensor) -> Tensor:
    """sin(πx)/(πx). PyTorch's own has no second derivative at 0, which is order 1."""
    near = x.abs() < 1e-4  # where a parabola is exact to rounding
    return torch.where(near, 1 - (math.pi * x) ** 2 / 6, torch.sinc(x.masked_fill(near, 1)))


def _of_terms(
    cls: type[PowerLawBasis], horizon: int, terms: int, order_min: float, use_shipped: bool
) -> PowerLawBasis:
    """The basis of that many terms, stored or fitted."""
    stored = shipped_bases().get((horizon, terms, order_min)) if use_shipped else None
    if stored is not None:  # a copy: the caller may write into its own
        arrays = stored.rates.copy(), stored.polynomials.copy()
        return cls(*arrays, horizon, order_min, stored.certificate)
    rates, polynomials, _ = fit_rates_and_polynomials(horizon, terms, order_min)
    certificate = certify(
        lambda orders: _weights(torch.from_numpy(orders), torch.from_numpy(polynomials)).numpy(),
        rates,
        order_min,
        horizon,
    )
    return cls(rates, polynomials, horizon, order_min, certificate)


def _warn_if_fewer_do_better(basis: PowerLawBasis, use_shipped: bool) -> None:
    """Warn where the terms with which the law reaches its end are twice as exact.

    Only a basis of more terms, and not as exact as it may be, is compared: others cost nothing.
    """
    horizon, error = basis.horizon, basis.certificate.relative
    if error <= 2 * FINEST_TOLERANCE:
        return
    counts = range(1, basis.terms)
    fewer = next((s for s in counts if expected_error(horizon, s) < FINEST_TOLERANCE), None)
    if fewer is None:
        return
    other = _of_terms(type(basis), horizon, fewer, basis.order_min, use_shipped)
    if error > 2 * other.certificate.relative:
        warnings.warn(
            f"{basis.terms} terms are too many for horizon {horizon}: their error is {error:.1e}, "
            f"that of {fewer} terms {other.certificate.relative:.1e}",
            stacklevel=3,
        )


def _fewest_terms(
    cls: type[PowerLawBasis], horizon: int, tolerance: float, order_min: float, use_shipped: bool
) -> PowerLawBasis:
    """Walk to the number of terms with quick fits, then accept the first certified full one."""

    def draft_error(terms: int) -> float:
        return fit_rates_and_polynomials(horizon, terms, order_min, draft=True)[2]

    # A full fit improves on a draft by less than this.
    gain = 2.0
    guesses = range(2, MAX_TERMS + 1)
    terms = next((s for s in guesses if expected_error(horizon, s) < tolerance), MAX_TERMS)
    while terms > 1 and draft_error(terms - 1) <= gain * tolerance:
        terms -= 1
    while terms <= MAX_TERMS:
        if draft_error(terms) <= gain * tolerance:
            basis = _of_terms(cls, horizon, terms, order_min, use_shipped)
            if basis.certificate.relative <= tolerance:
                return basis
        terms += 1
    raise ValueError(_unreachable(tolerance, horizon, order_min))


def _unreachable(tolerance: float, horizon: int, order_min: float) -> str:
    return (
        f"tolerance must be reachable within {MAX_TERMS} terms and at least {FINEST_TOLERANCE:g}, "
        f"got {tolerance:g} for horizon {horizon} and order_min {order_min:g}"
    )


def _save_safetensors(basis: PowerLawBasis, path: Path) -> None:
    from safetensors.numpy import save

    entry = basis.to_dict()
    arrays = {"rates": basis.rates, "polynomials": basis.polynomials}
    header = {key: value for key, value in entry.items() if key not in arrays}
    write_atomically(path, save(arrays, metadata={"basis": json.dumps(header)}))


def _load_safetensors(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata() or {}
        if "basis" not in metadata:
            raise ValueError(f"{path} holds no power-law basis")
        arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return {**json.loads(metadata["basis"]), **arrays}
