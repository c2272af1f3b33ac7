"""Shapes and options to check, and the relative error of the output and every gradient.

The truth is `PowerLawBasis.weights` in float64 on the very orders the kernels get. Errors are
`|x - truth| / |truth|`, of each scale apart since scales differ in size; NaN never passes.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from tests.ops.case import NamedCase, compared, difference_if_compiled
from vort.fractional import PowerLawBasis
from vort.ops.order_weights.triton import order_weights_fused

ORDER_MIN = 0.05


@dataclass(frozen=True)
class OrderCase(NamedCase):
    """One call of the op."""

    shape: tuple[int, ...] = (2, 37, 3)
    scales: int = 12
    degree: int = 3
    gate: bool = True
    strided: bool = False


@lru_cache(maxsize=16)
def make_basis(scales: int, degree: int) -> PowerLawBasis:
    """A basis of that many scales: a shipped one with polynomials of any degree, or like a fit."""
    shipped = PowerLawBasis.fit(horizon=10000, terms=12)
    generator = np.random.default_rng(scales)
    polynomials = generator.normal(size=(scales, degree + 1))
    if (scales, degree + 1) == shipped.polynomials.shape:
        polynomials = shipped.polynomials
    rates = np.linspace(0, 1, scales)
    return PowerLawBasis(rates, polynomials, 10000, ORDER_MIN, shipped.certificate)


def make_inputs(case: OrderCase, device: str, seed: int) -> dict[str, Tensor]:
    """Fresh random orders, with the ends and what is close to them, gates and gradients."""
    generator = torch.Generator().manual_seed(seed)
    order = ORDER_MIN + (1 - ORDER_MIN) * torch.rand(case.shape, generator=generator)
    special = torch.tensor([1.0, ORDER_MIN, 0.5, 1 - 2**-24, 1 - 1e-5, 1 - 1e-3, 0.4999, 0.5001])
    flat = order.view(-1)
    count = min(len(special), flat.numel())
    flat[:count] = special[:count]
    tensors = {"order": order}
    if case.gate:
        tensors["gate"] = torch.rand(case.shape, generator=generator)
    tensors["dweights"] = torch.randn(*case.shape, case.scales, generator=generator)
    return {name: x.to(device) for name, x in tensors.items()}


def outputs_and_gradients(
    case: OrderCase, inputs: dict[str, Tensor], wide: bool
) -> dict[str, Tensor]:
    """Weights and every gradient, by name: of the definition in float64, or of the kernels."""
    basis = make_basis(case.scales, case.degree)
    leaves = {
        name: (x.double() if wide else x).detach().clone().requires_grad_()
        for name, x in inputs.items()
        if name != "dweights"
    }
    order, gate = leaves["order"], leaves.get("gate")
    if case.strided:
        order = torch.stack([order, order], -1)[..., 1]
    if wide:
        weights = basis.weights(order, validate=False)
        weights = weights if gate is None else weights * gate.unsqueeze(-1)
    else:
        polynomials = basis.polynomials_on(order.device, order.dtype)
        weights = order_weights_fused(polynomials, order, gate)
    grads = torch.autograd.grad(
        weights, list(leaves.values()), inputs["dweights"].to(weights.dtype)
    )
    return {"weights": weights} | {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}


def relative_errors(
    case: OrderCase, dtype: torch.dtype, device: str, seed: int
) -> dict[str, float]:
    """Error of the output and every gradient; a second run must give the same bits.

    `dtype` must be float32: weights know no other on a GPU.
    """
    assert dtype == torch.float32
    inputs = make_inputs(case, device, seed)
    truth = outputs_and_gradients(case, inputs, wide=True)
    got, errors = compared(
        lambda: outputs_and_gradients(case, inputs, wide=False), truth, device, _error
    )
    for name, x in truth.items():
        if got[name].dtype != dtype or got[name].shape != x.shape:
            errors[f"{name} is {got[name].dtype} {list(got[name].shape)}"] = float("nan")
    at_one = inputs["order"] == 1
    if bool(at_one.any()) and bool((got["weights"][at_one][:, 1:] != 0).any()):
        errors["scales beyond the first at order 1"] = float("nan")
    return errors


def _error(name: str, got: Tensor, truth: Tensor) -> float:
    axes = tuple(range(truth.ndim - 1)) if name == "weights" else tuple(range(truth.ndim))
    if not truth.numel():
        return 0.0
    if not axes:
        return _largest((got - truth).abs(), truth.abs())
    wrong = torch.linalg.vector_norm(got - truth, dim=axes)
    return _largest(wrong, torch.linalg.vector_norm(truth, dim=axes))


def _largest(wrong: Tensor, size: Tensor) -> float:
    """The largest error where the truth is not 0, and infinity where it is 0 and is missed."""
    return torch.where(wrong == 0, 0.0, wrong / size).max().item()


def compiled_difference(device: str) -> float:
    """Relative difference of gradients with and without `torch.compile(fullgraph=True)`."""
    case = OrderCase()
    inputs = make_inputs(case, device, 0)
    basis = make_basis(case.scales, case.degree)

    def loss(order: Tensor, gate: Tensor) -> Tensor:
        polynomials = basis.polynomials_on(order.device, order.dtype)
        weights = order_weights_fused(polynomials, order, gate)
        return (weights * order_weights_fused(polynomials, gate, None)).sum()

    return difference_if_compiled(loss, [inputs["order"], inputs["gate"]])


GPU_CASES = [
    OrderCase(shape=(3, 5001, 2)),
    OrderCase(gate=False),
    OrderCase(degree=4, scales=16),
    OrderCase(scales=1),
    OrderCase(scales=2),
    OrderCase(scales=3, gate=False),
    OrderCase(scales=64, degree=4),
    OrderCase(strided=True),
    OrderCase(shape=(1,)),
    OrderCase(shape=(0, 3)),
]

INTERPRETER_CASES = [
    OrderCase(),
    OrderCase(gate=False),
    OrderCase(degree=4, scales=16),
    OrderCase(shape=(1001,), scales=1),
    OrderCase(scales=1, gate=False, degree=4),
    OrderCase(scales=2),
    OrderCase(scales=3, gate=False),
    OrderCase(scales=64, degree=4, shape=(65,)),
    OrderCase(scales=4, degree=0),
    OrderCase(strided=True),
    OrderCase(shape=()),
    OrderCase(shape=(0, 3)),
    OrderCase(shape=(0, 3), gate=False),
]
