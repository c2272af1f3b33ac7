"""The GPU kernels, run by Triton's interpreter on the CPU, against PyTorch in float64."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CLAIMS = [
    "equals_exact",
    "adds_up_the_blocks_of_a_program",
    "cases_reach_the_bounds",
    "compiles_into_one_graph",
    "obeys_torch_library",
]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("claim", CLAIMS)
def test_fused_feature_maps_in_the_interpreter(claim: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.ops.feature_maps_triton.run_interpreter", claim],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]


@pytest.mark.parametrize("name", ["hedgehog", "favor"])
def test_feature_maps_on_a_cpu_do_not_import_the_kernels(name: str) -> None:
    code = (
        "import sys, torch; from vort.ops import feature_map; "
        f"phi = feature_map({name!r}, 4); phi(torch.zeros(1, 3, 1, 4)); "
        "sys.exit('vort.ops.feature_maps.triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
