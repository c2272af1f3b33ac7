"""The kernels on a GPU: every gradient against float64, twice, into memory filled with NaN."""

import pytest
import torch

from tests.ops.local_attention.fused import (
    GPU_CASES,
    LocalCase,
    changed_past,
    compiled_difference,
    relative_errors,
)
from vort.ops.local_attention.attention import attend

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

BOUNDS = [(torch.bfloat16, 1e-2), (torch.float32, 1e-4)]


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS, ids=lambda x: str(x))
@pytest.mark.parametrize("case", GPU_CASES, ids=lambda case: case.name)
def test_every_output_and_gradient_equals_exact(
    case: LocalCase, dtype: torch.dtype, bound: float
) -> None:
    errors = relative_errors(case, dtype, "cuda", torch.seed() % 2**31)
    assert all(error <= bound for error in errors.values()), errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_changing_a_position_leaves_the_past_bit_identical(dtype: torch.dtype) -> None:
    assert changed_past("cuda", dtype) == 0


def test_torch_compile_in_one_graph_gives_the_same_gradients() -> None:
    assert compiled_difference("cuda") <= 1e-5


def test_kernels_are_chosen_where_they_apply() -> None:
    x = torch.randn(1, 50, 2, 16, device="cuda", dtype=torch.bfloat16)
    chosen, _ = attend(x, x, x, 9, scale=0.25)
    fused, _ = attend(x, x, x, 9, scale=0.25, backend="triton")
    assert torch.equal(chosen, fused)
    wide = torch.randn(1, 50, 2, 160, device="cuda", dtype=torch.bfloat16)
    assert attend(wide, wide, wide, 9, scale=0.25)[0].shape == wide.shape
