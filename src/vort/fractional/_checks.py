"""Argument checks: each error names the argument, what was given and what is allowed."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor


def looks_at_values(x: Tensor) -> bool:
    """Whether a look at the values of `x` costs no synchronisation, and breaks no graph."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _has_numbers(x: Tensor) -> bool:
    """Not so of what stands for a whole batch of numbers, nor of what has a shape alone."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return False
    return not (x.is_meta or isinstance(x, FakeTensor))


def as_order(order: Any, name: str = "order") -> Tensor:
    """`order` as a floating-point tensor (float64 unless it is a tensor already), checked."""
    if isinstance(order, Tensor):
        value = order if order.is_floating_point() else order.to(torch.float64)
    else:
        value = torch.as_tensor(order, dtype=torch.float64)
    check_order(value, name)
    return value


def check_order(order: Tensor, name: str = "order", low: float = 0.0) -> None:
    """Raise unless every element lies in (0, 1], or in [low, 1] for a positive `low`."""
    if not _has_numbers(order):
        return
    detached = order.detach()
    bad = ~((detached >= low) & (detached > 0) & (detached <= 1))
    if not bool(bad.any()):
        return
    index = tuple(int(i) for i in bad.nonzero()[0])
    interval = f"[{low:g}, 1]" if low > 0 else "(0, 1]"
    where = f" at index {index[0] if len(index) == 1 else index}" if index else ""
    raise ValueError(f"{name} must lie in {interval}, got {float(detached[index]):g}{where}")


def check_lag(lag: Tensor) -> None:
    """Raise unless every element is a whole number >= 0, where looking costs nothing."""
    if not (looks_at_values(lag) and _has_numbers(lag)):
        return
    detached = lag.detach()
    bad = ~(detached >= 0)
    if lag.is_floating_point():
        bad |= (detached != detached.floor()) | detached.isinf()
    if bool(bad.any()):
        index = tuple(bad.nonzero()[0].tolist())
        raise ValueError(f"lag must be whole numbers >= 0, got {float(detached[index]):g}")


def check_at_least(value: Any, minimum: int, name: str) -> int:
    """`value` as an int, raising unless it is a whole number >= `minimum`."""
    try:
        whole = minimum <= value < float("inf") and int(value) == value
    except TypeError:  # no number
        whole = False
    if isinstance(value, bool) or not whole:
        raise ValueError(f"{name} must be a whole number >= {minimum}, got {value!r}")
    return int(value)


def check_open_unit(value: float, name: str) -> float:
    """`value` as a float, raising unless it lies strictly between 0 and 1."""
    try:
        inside = 0.0 < value < 1.0
    except TypeError:  # no number
        inside = False
    if not inside:
        raise ValueError(f"{name} must lie in (0, 1), got {value!r}")
    return float(value)


def check_positive(value: float, name: str) -> float:
    """`value` as a float, raising unless it is positive and finite."""
    if not 0.0 < value < float("inf"):
        raise ValueError(f"{name} must be positive and finite, got {value!r}")
    return float(value)
