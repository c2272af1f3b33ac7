"""The GPU kernels, run by Triton's interpreter on the CPU, against the definition in float64."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from vort.ops.rms_norm import rms_norm

ROOT = Path(__file__).resolve().parents[3]
CLAIMS = [
    "equals_exact",
    "programs_that_walk_several_blocks_equal_exact",
    "keeps_types_under_autocast",
    "compiles_into_one_graph",
    "obeys_torch_library",
]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("claim", CLAIMS)
def test_fused_rms_norm_in_the_interpreter(claim: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.ops.rms_norm.run_interpreter", claim],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]


def test_rms_norm_on_a_cpu_does_not_import_the_kernels() -> None:
    code = (
        "import sys, torch; from vort.layers import RMSNorm; RMSNorm(4)(torch.ones(3, 4)); "
        "sys.exit('vort.ops.rms_norm.triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


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
