"""Grünwald–Letnikov weights and the fractional sum they define, exact to rounding."""

import math
from typing import Any

import torch
from torch import Tensor

from vort.fractional._checks import as_order, check_at_least, check_lag

# Below this lag the weights are products of at most 32 factors; from it on, Stirling's series to
# the fifth term is exact to 1e-17.
_HEAD = 32
_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188)


def gl_weights(order: Any, horizon: int) -> Tensor:
    """Weights w_0 ... w_horizon of eq. GL-disc, accurate to about 1e-14 at any lag.

    Args:
        order: number or tensor in (0, 1], any shape `[...]`. Differentiable.
        horizon: the largest lag.

    Returns:
        `[..., horizon + 1]`, float64, or the dtype of `order` if that is a tensor.

    >>> gl_weights(0.5, 3).tolist()
    [1.0, 0.5, 0.375, 0.3125]
    """
    value = as_order(order)
    horizon = check_at_least(horizon, 0, "horizon")
    exact = value.to(torch.float64)
    weights = _head_weights(exact)[..., : horizon + 1]
    if horizon >= _HEAD:
        lags = torch.arange(_HEAD, horizon + 1, dtype=torch.float64, device=value.device)
        weights = torch.cat([weights, log_tail_weight(exact[..., None], lags).exp()], -1)
    return weights.to(value.dtype)


def gl_kernel(order: Any, lag: Tensor) -> Tensor:
    """The weight w_lag of eq. GL-disc, elementwise over broadcast `order` and whole `lag` >= 0.

    >>> gl_kernel(torch.tensor([0.5, 1.0]), torch.tensor([2, 7])).tolist()
    [0.375, 1.0]
    """
    value = as_order(order)
    check_lag(lag)
    exact, lags = torch.broadcast_tensors(value.to(torch.float64), lag.to(torch.float64))
    index = lags.clamp(0, _HEAD - 1).to(torch.int64)[..., None]
    head = _head_weights(exact).gather(-1, index)[..., 0]
    tail = log_tail_weight(exact, lags.clamp(min=_HEAD)).exp()
    return torch.where(lags < _HEAD, head, tail).to(value.dtype)


def gl_partial_sums(order: Any, horizon: int) -> Tensor:
    """Sums w_0 + ... + w_n for n = 0 ... horizon, in closed form (proposition bankgrowth, E8).

    Shapes and dtype as `gl_weights`.

    >>> gl_partial_sums(0.5, 3).tolist()
    [1.0, 1.5, 1.875, 2.1875]
    """
    value = as_order(order)[..., None]
    weights = gl_weights(order, horizon)
    lags = torch.arange(weights.shape[-1], dtype=torch.float64, device=value.device)
    return weights * ((lags + value) / value).to(weights.dtype)


def frequency_response(order: Any, omega: Any) -> Tensor:
    """W(e^{iω}) = (1 - e^{iω})^-order of lemma ztransform, complex; its modulus falls as ω^-order.

    Args:
        order: number or tensor in (0, 1].
        omega: angular frequency in radians per step, broadcast against `order`, not 0 mod 2π.
    """
    value = as_order(order).to(torch.float64)
    angle = torch.as_tensor(omega, dtype=torch.float64)
    half = torch.remainder(angle, 2 * math.pi) / 2
    if bool((half == 0).any()):
        raise ValueError("omega must not be a multiple of 2π: the response has a pole there")
    # 1 - e^{iω} = 2 sin(ω/2) e^{i(ω-π)/2} for ω in (0, 2π): no cancellation at small ω.
    return torch.polar((2 * half.sin()) ** -value, value * (math.pi / 2 - half))


def fractional_sum(x: Tensor, order: Any, dim: int = -1) -> Tensor:
    """The GL sum of eq. GL-disc along `dim`, y_t = Σ_j w_j x_{t-j}, in O(T log T) by FFT.

    Args:
        x: floating-point tensor; time runs along `dim`.
        order: number, or tensor that broadcasts against `x` without `dim`. Differentiable.
        dim: the time axis.

    >>> fractional_sum(torch.ones(4, dtype=torch.float64), 1.0).round().tolist()
    [1.0, 2.0, 3.0, 4.0]
    """
    _check_series(x)
    series = x.movedim(dim, -1)
    steps = series.shape[-1]
    if steps == 0:
        return x.clone()
    # Half precision has no FFT on most devices.
    work = torch.promote_types(series.dtype, torch.float32)
    kernel = gl_weights(_on_device(order, x), steps - 1).to(work)
    length = 2 * steps
    product = torch.fft.rfft(series.to(work), length) * torch.fft.rfft(kernel, length)
    result: Tensor = torch.fft.irfft(product, length)[..., :steps]
    return result.to(x.dtype).movedim(-1, dim)


def fractional_sum_direct(x: Tensor, order: Any, dim: int = -1) -> Tensor:
    """The same sum term by term, O(T²): the oracle of `fractional_sum`."""
    _check_series(x)
    series = x.movedim(dim, -1)
    steps = torch.arange(series.shape[-1], device=x.device)
    lag = steps[:, None] - steps[None, :]
    value = as_order(_on_device(order, x))[..., None, None]
    kernel = torch.where(lag >= 0, gl_kernel(value, lag.clamp(min=0)), 0.0).to(series.dtype)
    return (kernel @ series[..., None])[..., 0].movedim(-1, dim)


def _check_series(x: Tensor) -> None:
    # The sum has the type of x, and weights are no whole numbers.
    if not x.is_floating_point():
        raise ValueError(f"x must be floating point, got {x.dtype}")


def _on_device(order: Any, x: Tensor) -> Any:
    return order.to(x.device) if isinstance(order, Tensor) else order


def _head_weights(order: Tensor) -> Tensor:
    """w_0 ... w_31 by the recurrence w_j = w_{j-1} (j - 1 + order) / j; `[...] -> [..., 32]`."""
    lags = torch.arange(1, _HEAD, dtype=order.dtype, device=order.device)
    factors = (lags - 1 + order[..., None]) / lags
    return torch.cat([torch.ones_like(order)[..., None], factors.cumprod(-1)], -1)


def log_tail_weight(order: Tensor, lag: Tensor) -> Tensor:
    """log w_lag for real lag >= 32.

    A difference of two log-gammas loses eight digits at lag 1e7. Written with log1p, Stirling's
    formula has no term larger than the result.
    """
    shift = order - 1
    leading = shift * (lag + 1).log() + (lag + order - 0.5) * (shift / (lag + 1)).log1p() - shift
    return leading + _stirling(lag + order) - _stirling(lag + 1) - torch.lgamma(order)


def _stirling(z: Tensor) -> Tensor:
    square = z**-2
    series = torch.zeros_like(z)
    for coefficient in reversed(_STIRLING):
        series = series * square + coefficient
    return series / z
