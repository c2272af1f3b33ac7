"""The kernels on a GPU: every gradient against float64, twice, into memory filled with NaN."""

import pytest
import torch

from tests.ops.feature_maps.cases import (
    GPU_CASES,
    MapCase,
    compiled_difference,
    exact,
    make_inputs,
    outputs_and_gradients,
    relative_errors,
)

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

BOUNDS = [(torch.bfloat16, 1e-2), (torch.float32, 1e-4)]
KINDS = ["hedgehog", "favor"]


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS, ids=lambda x: str(x))
@pytest.mark.parametrize("case", GPU_CASES, ids=lambda case: f"{case.kind},{case.name}")
def test_features_and_every_gradient_equal_exact(
    case: MapCase, dtype: torch.dtype, bound: float
) -> None:
    errors = relative_errors(case, dtype, "cuda", torch.seed() % 2**31)
    assert all(error <= bound for error in errors.values()), errors


def test_torch_compile_in_one_graph_gives_the_same_gradients() -> None:
    assert compiled_difference("cuda") <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_changes_no_bit(kind: str, dtype: torch.dtype) -> None:
    case = MapCase(kind)
    inputs = make_inputs(case, dtype, "cuda", 0)
    plain = outputs_and_gradients(exact, case, inputs, wide=False)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        cast = outputs_and_gradients(exact, case, inputs, wide=False)
    assert all(torch.equal(cast[name], x) for name, x in plain.items())


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_are_chosen_where_they_apply(kind: str) -> None:
    def runs_kernels(x: torch.Tensor, matrix: torch.Tensor) -> bool:
        features = exact(MapCase(kind), x, matrix)
        return type(features.grad_fn).__name__ in ("hedgehog_fusedBackward", "favor_fusedBackward")

    inputs = make_inputs(MapCase(kind), torch.bfloat16, "cuda", 0)
    x, matrix = inputs["x"].requires_grad_(), inputs["matrix"]
    assert runs_kernels(x, matrix)
    assert not runs_kernels(x.detach().double().requires_grad_(), matrix)
    wide = make_inputs(MapCase(kind, dim=16, features=257), torch.bfloat16, "cuda", 0)
    assert not runs_kernels(wide["x"].requires_grad_(), wide["matrix"])


def test_a_projection_that_wants_a_gradient_gets_one() -> None:
    inputs = make_inputs(MapCase("favor"), torch.float32, "cuda", 0)
    features = exact(MapCase("favor"), inputs["x"], inputs["matrix"].requires_grad_())
    assert torch.autograd.grad(features.sum(), inputs["matrix"])[0].norm() > 0
