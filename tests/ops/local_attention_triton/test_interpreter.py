"""The GPU kernels, run by Triton's interpreter on the CPU, against the exact form in float64."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vort.ops.local_attention import local_attention

ROOT = Path(__file__).resolve().parents[3]
CLAIMS = [
    "equals_exact",
    "is_causal_to_the_bit",
    "compiles_into_one_graph",
    "obeys_torch_library",
    "rotates_as_pytorch_does",
]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("claim", CLAIMS)
def test_fused_local_attention_in_the_interpreter(claim: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.ops.local_attention_triton.run_interpreter", claim],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]


def test_local_attention_on_a_cpu_does_not_import_the_kernels() -> None:
    code = (
        "import sys, torch; from vort.ops import local_attention; x = torch.zeros(1, 3, 1, 4); "
        "local_attention(x, x, x, 2, rope_base=1e4); "
        "sys.exit('vort.ops.local_attention.triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter takes them")
def test_asking_for_the_kernels_without_a_gpu_is_refused() -> None:
    x = torch.zeros(1, 3, 1, 4)
    with pytest.raises(RuntimeError, match="'triton' needs CUDA tensors, got cpu; use 'block'"):
        local_attention(x, x, x, 2, backend="triton")
