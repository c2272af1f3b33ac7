"""The kernels on a GPU: every gradient against float64, twice, into memory filled with NaN."""

import pytest
import torch
from torch.nn import functional as F

from vort.ops.rms_norm import rms_norm

pytest.importorskip("triton")
from tests.ops.rms_norm.cases import (
    GPU_CASES,
    NormCase,
    compiled_difference,
    relative_errors,
)
from vort.ops.rms_norm.triton import rms_norm_fused

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

BOUNDS = [(torch.bfloat16, 1e-2), (torch.float32, 1e-4)]


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS, ids=lambda x: str(x))
@pytest.mark.parametrize("case", GPU_CASES, ids=lambda case: case.name)
def test_every_output_and_gradient_equals_exact(
    case: NormCase, dtype: torch.dtype, bound: float
) -> None:
    errors = relative_errors(case, dtype, "cuda", torch.seed() % 2**31)
    assert all(error <= bound for error in errors.values()), errors


def test_torch_compile_in_one_graph_gives_the_same_gradients() -> None:
    assert compiled_difference("cuda") <= 1e-5


def test_kernels_are_chosen_where_they_apply() -> None:
    x = torch.randn(5, 50, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(64, device="cuda")
    assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm_fused(x, weight, 1e-6))
    for other in (x.double(), torch.randn(3, 1025, device="cuda")):
        wanted = F.rms_norm(other, other.shape[-1:], None, 1e-6)
        assert torch.equal(rms_norm(other, None, 1e-6), wanted)


def test_autocast_changes_nothing() -> None:
    x, weight = torch.randn(5, 64, device="cuda"), torch.randn(64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        within = rms_norm(x, weight, 1e-6)
    assert within.dtype == torch.float32
    assert torch.equal(within, rms_norm(x, weight, 1e-6))
