"""The GPU kernels, run by Triton's interpreter on the CPU, against the definition in float64;
when they are chosen."""

import pytest
import torch
from torch.nn import functional as F

from tests.ops.interpreter import check_in_interpreter, claims_of, imports, needs_triton
from vort.ops.rms_norm import rms_norm


@needs_triton
@pytest.mark.parametrize("claim", claims_of("rms_norm"))
def test_fused_rms_norm_in_the_interpreter(claim: str) -> None:
    check_in_interpreter("rms_norm", claim)


def test_rms_norm_on_a_cpu_does_not_import_the_kernels() -> None:
    code = "import torch; from vort.layers import RMSNorm; RMSNorm(4)(torch.ones(3, 4)); "
    assert not imports("vort.ops.rms_norm.triton", code)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("eps", [1e-6, None])
def test_rms_norm_on_a_cpu_is_that_of_pytorch_to_the_bit(
    dtype: torch.dtype, eps: float | None
) -> None:
    x, weight = torch.randn(3, 5, 20, dtype=dtype), torch.randn(20)
    wanted = F.rms_norm(x, (20,), weight.to(dtype), eps)
    assert torch.equal(rms_norm(x, weight, eps), wanted)
    assert torch.equal(rms_norm(x, None, eps), F.rms_norm(x, (20,), None, eps))


def test_a_weight_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight must have .* last axis, \[4\], got \[5\]"):
        rms_norm(torch.ones(3, 4), torch.ones(5))


@needs_triton
@pytest.mark.gpu
@pytest.mark.slow
def test_kernels_are_chosen_where_they_apply() -> None:
    from vort.ops.rms_norm.triton import rms_norm_fused

    x = torch.randn(5, 50, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(64, device="cuda")
    assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm_fused(x, weight, 1e-6))
    for other in (x.double(), torch.randn(3, 1025, device="cuda")):
        wanted = F.rms_norm(other, other.shape[-1:], None, 1e-6)
        assert torch.equal(rms_norm(other, None, 1e-6), wanted)


@needs_triton
@pytest.mark.gpu
@pytest.mark.slow
def test_autocast_changes_nothing() -> None:
    x, weight = torch.randn(5, 64, device="cuda"), torch.randn(64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        within = rms_norm(x, weight, 1e-6)
    assert within.dtype == torch.float32
    assert torch.equal(within, rms_norm(x, weight, 1e-6))
