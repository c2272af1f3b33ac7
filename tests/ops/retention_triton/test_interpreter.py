"""The GPU kernels, run by Triton's interpreter on the CPU, against the exact form in float64."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PARTS = 3


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("part", range(PARTS))
def test_every_output_and_gradient_equals_exact_in_the_interpreter(part: int) -> None:
    module = "tests.ops.retention_triton.run_interpreter"
    result = subprocess.run(
        [sys.executable, "-m", module, str(part), str(PARTS)],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]


def test_importing_vort_does_not_import_triton() -> None:
    code = "import sys, vort.ops.retention; sys.exit('vort.ops.retention.triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
