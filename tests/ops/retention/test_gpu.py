"""The kernels on a GPU: every gradient against float64, twice, into memory filled with NaN."""

import pytest
import torch

from tests.ops.retention.fused import (
    GPU_CASES,
    STEP_CASES,
    Case,
    compiled_difference,
    relative_errors,
    step_errors,
)
from vort.ops.retention import explain_backend

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

BOUNDS = [(torch.bfloat16, 1e-2), (torch.float32, 1e-4)]


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS, ids=lambda x: str(x))
@pytest.mark.parametrize("case", GPU_CASES, ids=lambda case: case.name)
def test_every_output_and_gradient_equals_exact(
    case: Case, dtype: torch.dtype, bound: float
) -> None:
    errors = relative_errors(case, dtype, "cuda", torch.seed() % 2**31)
    assert all(error <= bound for error in errors.values()), errors


@pytest.mark.parametrize("case", STEP_CASES, ids=lambda case: case.name)
def test_steps_equal_exact(case: Case) -> None:
    errors = step_errors(case, torch.float32, "cuda", 0)
    assert all(error <= 1e-4 for error in errors.values()), errors


def test_one_token_without_gradients_takes_the_fused_step() -> None:
    q = torch.zeros(1, 1, 2, 16, device="cuda")
    assert explain_backend(q) == "triton: one token on a GPU with Triton"
    assert explain_backend(q.requires_grad_()).startswith("recurrent")


def test_torch_compile_in_one_graph_gives_the_same_gradients() -> None:
    assert compiled_difference("cuda") <= 1e-5
