"""The kernels of a step of decoding: in Triton's interpreter here, on a GPU where there is one."""

import pytest
import torch

from tests.ops.decoding.cases import GPU_CHECKS
from tests.ops.interpreter import check_in_interpreter, claims_of, needs_triton


@needs_triton
@pytest.mark.parametrize("claim", claims_of("decoding"))
def test_kernels_in_the_interpreter(claim: str) -> None:
    check_in_interpreter("decoding", claim)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", GPU_CHECKS)
def test_kernels_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    errors = GPU_CHECKS[name](dtype, "cuda", 0)
    narrow = dtype == torch.bfloat16 or "bfloat16" in name
    assert all(e <= (1e-2 if narrow else 1e-4) for e in errors.values()), errors
