"""The GPU kernels, run by Triton's interpreter on the CPU, against the exact form in float64; when
they are chosen."""

import os

import pytest
import torch

from tests.ops.interpreter import check_in_interpreter, claims_of, imports, needs_triton
from vort.ops.local_attention import local_attention
from vort.ops.local_attention.attention import attend


@needs_triton
@pytest.mark.parametrize("claim", claims_of("local_attention"))
def test_fused_local_attention_in_the_interpreter(claim: str) -> None:
    check_in_interpreter("local_attention", claim)


def test_local_attention_on_a_cpu_does_not_import_the_kernels() -> None:
    code = (
        "import torch; from vort.ops import local_attention; x = torch.zeros(1, 3, 1, 4); "
        "local_attention(x, x, x, 2, rope_base=1e4); "
    )
    assert not imports("vort.ops.local_attention.triton", code)


@needs_triton
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter takes them")
def test_asking_for_the_kernels_without_a_gpu_is_refused() -> None:
    x = torch.zeros(1, 3, 1, 4)
    with pytest.raises(RuntimeError, match="'triton' needs CUDA tensors, got cpu; use 'block'"):
        local_attention(x, x, x, 2, backend="triton")


@pytest.mark.gpu
@pytest.mark.slow
def test_kernels_are_chosen_where_they_apply() -> None:
    x = torch.randn(1, 50, 2, 16, device="cuda", dtype=torch.bfloat16)
    chosen, _ = attend(x, x, x, 9, scale=0.25)
    fused, _ = attend(x, x, x, 9, scale=0.25, backend="triton")
    assert torch.equal(chosen, fused)
    wide = torch.randn(1, 50, 2, 160, device="cuda", dtype=torch.bfloat16)
    assert attend(wide, wide, wide, 9, scale=0.25)[0].shape == wide.shape
