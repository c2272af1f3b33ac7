"""The GPU kernels, run by Triton's interpreter on the CPU, against PyTorch in float64; when
they are chosen."""

import pytest
import torch

from tests.ops.feature_maps.cases import MapCase, exact, make_inputs, outputs_and_gradients
from tests.ops.interpreter import check_in_interpreter, claims_of, imports, needs_triton

KINDS = ["hedgehog", "favor"]


@needs_triton
@pytest.mark.parametrize("claim", claims_of("feature_maps"))
def test_fused_feature_maps_in_the_interpreter(claim: str) -> None:
    check_in_interpreter("feature_maps", claim)


@pytest.mark.parametrize("name", KINDS)
def test_feature_maps_on_a_cpu_do_not_import_the_kernels(name: str) -> None:
    code = (
        "import torch; from vort.ops import feature_map; "
        f"phi = feature_map({name!r}, 4); phi(torch.zeros(1, 3, 1, 4)); "
    )
    assert not imports("vort.ops.feature_maps.triton", code)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_changes_no_bit(kind: str, dtype: torch.dtype) -> None:
    case = MapCase(kind)
    inputs = make_inputs(case, dtype, "cuda", 0)
    plain = outputs_and_gradients(exact, case, inputs, wide=False)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        cast = outputs_and_gradients(exact, case, inputs, wide=False)
    assert all(torch.equal(cast[name], x) for name, x in plain.items())


@pytest.mark.gpu
@pytest.mark.slow
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


@pytest.mark.gpu
@pytest.mark.slow
def test_a_projection_that_wants_a_gradient_gets_one() -> None:
    inputs = make_inputs(MapCase("favor"), torch.float32, "cuda", 0)
    features = exact(MapCase("favor"), inputs["x"], inputs["matrix"].requires_grad_())
    assert torch.autograd.grad(features.sum(), inputs["matrix"])[0].norm() > 0
