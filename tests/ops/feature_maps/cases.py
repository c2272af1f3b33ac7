"""Shapes and options to check, and the relative error of features and of every gradient.

The truth is the PyTorch form in float64 on the very inputs the kernels get (rounded to bfloat16
first where they are bfloat16; weights stay float32). Errors are `|x - truth| / |truth|`, NaN never
passes.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.ops.case import NamedCase, compared, difference_if_compiled, relative_or_of_ones
from vort.ops.feature_maps import draw_projection, favor_features, hedgehog_features
from vort.ops.feature_maps.favor import CEILING


@dataclass(frozen=True)
class MapCase(NamedCase):
    """One call of a map: x `[*leading, heads, dim]`, `features` columns of the weight."""

    unnamed: ClassVar[tuple[str, ...]] = ("kind",)

    kind: str = "hedgehog"
    leading: tuple[int, ...] = (2, 37)
    heads: int = 2
    dim: int = 16
    features: int = 16
    shared: bool = False  # hedgehog: one weight for all heads
    spread: float = 1.0
    max_norm: float | None = 6.0
    shift: bool = False
    aligned: bool = False  # favor: x along rows of the projection, where exponents are largest


def make_inputs(case: MapCase, dtype: torch.dtype, device: str, seed: int) -> dict[str, Tensor]:
    """Fresh random tensors: x, the weight or projection, and the gradient that comes back."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if case.kind == "favor":
        matrix = draw_projection(case.features, case.dim, generator=generator)
    else:
        heads = () if case.shared else (case.heads,)
        matrix = normal(*heads, case.dim, case.features) * case.dim**-0.5
    x = case.spread * normal(*case.leading, case.heads, case.dim)
    if case.aligned:
        rows = matrix[torch.randint(case.features, x.shape[:-1], generator=generator)]
        # w·y - |y|²/2 is largest, |w|²/2, at y = w: here it lies on both sides of the ceiling
        length = torch.rand(*x.shape[:-1], 1, generator=generator)
        x = 0.1 * x + length * rows * case.dim**0.25
    columns = case.features if case.kind == "favor" else 2 * case.features
    tensors = {
        "x": x.to(dtype),
        "matrix": matrix,
        "do": normal(*case.leading, case.heads, columns).to(dtype),
    }
    return {name: x.to(device) for name, x in tensors.items()}


def exact(case: MapCase, x: Tensor, matrix: Tensor) -> Tensor:
    """The public function: PyTorch for float64 and on a CPU, kernels on a GPU."""
    if case.kind == "hedgehog":
        return hedgehog_features(x, matrix)
    return favor_features(x, matrix, max_norm=case.max_norm, shift_by_position=case.shift)


def fused(case: MapCase, x: Tensor, matrix: Tensor) -> Tensor:
    """The kernels: through the public function on a GPU, beneath it in the interpreter."""
    if x.is_cuda:
        return exact(case, x, matrix)
    from vort.ops.feature_maps.triton import favor_fused, hedgehog_fused

    if case.kind == "hedgehog":
        return hedgehog_fused(x, matrix)
    return favor_fused(x, matrix, max_norm=case.max_norm, shift=case.shift, ceiling=CEILING)


def outputs_and_gradients(
    function: Any, case: MapCase, inputs: dict[str, Tensor], wide: bool
) -> dict[str, Tensor]:
    """Features and every gradient, by name."""
    learned = ("x", "matrix") if case.kind == "hedgehog" else ("x",)
    given = {name: (x.double() if wide else x).detach().clone() for name, x in inputs.items()}
    leaves = [given[name].requires_grad_() for name in learned]
    features = function(case, given["x"], given["matrix"])
    grads = torch.autograd.grad(features, leaves, given["do"])
    for leaf, grad in zip(leaves, grads, strict=True):
        assert grad.dtype == leaf.dtype
    assert features.dtype == given["x"].dtype
    return {"features": features} | {f"d{n}": g for n, g in zip(learned, grads, strict=True)}


def relative_errors(case: MapCase, dtype: torch.dtype, device: str, seed: int) -> dict[str, float]:
    """Error of features and every gradient; a second run must give the same bits."""
    inputs = make_inputs(case, dtype, device, seed)
    truth = outputs_and_gradients(exact, case, inputs, wide=True)
    # no tokens, no gradient to the weight; one column, a softmax of one
    return compared(
        lambda: outputs_and_gradients(fused, case, inputs, wide=False),
        truth,
        device,
        relative_or_of_ones,
    )[1]


def bounds_reached(case: MapCase, seed: int) -> tuple[float, float]:
    """Share of rows longer than `max_norm`, and of features whose exponent is above the ceiling."""
    inputs = make_inputs(case, torch.float32, "cpu", seed)
    scaled = inputs["x"].double() * case.dim**-0.25
    norm = scaled.norm(dim=-1)
    exponent = scaled @ inputs["matrix"].double().mT - norm[..., None] ** 2 / 2
    cut = 0.0 if case.max_norm is None else (norm > case.max_norm).double().mean().item()
    return cut, (exponent > CEILING).double().mean().item()


def compiled_difference(device: str) -> float:
    """Relative difference of gradients with and without `torch.compile(fullgraph=True)`."""
    cases = [
        MapCase(),
        MapCase(shared=True),
        MapCase("favor"),
        MapCase("favor", shift=True, max_norm=None),
    ]
    inputs = [make_inputs(case, torch.float32, device, seed) for seed, case in enumerate(cases)]

    def loss(x: Tensor, *weights: Tensor) -> Tensor:
        total = x.new_zeros(())
        for case, given, weight in zip(cases, inputs, weights, strict=False):
            total = total + (fused(case, x, weight) * given["do"]).sum()
        for case, given in zip(cases[2:], inputs[2:], strict=True):
            total = total + (fused(case, x, given["matrix"]) * given["do"]).sum()
        return total

    return difference_if_compiled(loss, [inputs[0]["x"], inputs[0]["matrix"], inputs[1]["matrix"]])


# Cases whose inputs pass the bounds that they are there for; `bounds_reached` says so.
LONG = MapCase("favor", dim=64, features=64, spread=2.2)
LONG_QUERIES = MapCase("favor", dim=64, features=64, spread=4.0, shift=True)
HIGH = MapCase("favor", dim=80, features=64, max_norm=None, aligned=True)
HIGH_AND_LONG = MapCase("favor", dim=80, features=64, max_norm=6.0, aligned=True)

INTERPRETER_CASES = [
    MapCase(),
    MapCase(leading=(2, 37), heads=3, dim=20, features=10, shared=True),
    MapCase(leading=(), heads=1),
    MapCase(leading=(3, 0)),
    MapCase(leading=(70,), heads=1, dim=80, features=32),
    MapCase(leading=(40,), dim=200, features=130, heads=1),
    MapCase(leading=(33,), spread=8.0, features=1),
    MapCase(leading=(33,), spread=8.0),
    MapCase("favor"),
    MapCase("favor", leading=(37,), heads=3, dim=20, features=10),
    MapCase("favor", leading=(37,), heads=3, dim=20, features=10, shift=True),
    MapCase("favor", leading=(), heads=1, features=1, shift=True),
    MapCase("favor", leading=(3, 0)),
    MapCase("favor", leading=(40,), dim=200, features=130, heads=1, shift=True),
    MapCase("favor", max_norm=None),
    LONG,
    LONG_QUERIES,
    HIGH,
    HIGH_AND_LONG,
]

GPU_CASES = [
    *INTERPRETER_CASES,
    MapCase(leading=(2, 40001), dim=64, features=32),
    MapCase(leading=(40001,), dim=64, features=64, heads=3, shared=True),
    MapCase(leading=(1001,), dim=128, features=128),
    MapCase(leading=(1001,), dim=256, features=256),
    MapCase(leading=(1001,), dim=16, features=256),
    MapCase(leading=(1001,), dim=256, features=16),
    MapCase("favor", leading=(2, 5003), dim=64, features=64),
    MapCase("favor", leading=(2, 5003), dim=64, features=64, shift=True),
    MapCase("favor", leading=(1001,), dim=128, features=128, shift=True),
    MapCase("favor", leading=(1001,), dim=256, features=256),
    MapCase("favor", leading=(1001,), dim=16, features=256),
    MapCase("favor", leading=(1001,), dim=256, features=16),
]
