"""Several processes share a batch and end with the weights that one would."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

SCRIPT = """
import os, sys
import torch
assert os.environ.get("WORLD_SIZE", "1") == sys.argv[3]
torch.set_num_threads(1)
from tests.lab.training.tiny import TASK, quick, tiny
from vort.lab.training import train
config = quick(steps=4, accumulation=int(sys.argv[2]), evaluate_every=2)
found = train(tiny(dropout=0.0), TASK, config, directory=sys.argv[1])
assert found.test["all"]["count"] == 90, found.test
"""


@pytest.mark.slow
def test_two_processes_end_with_the_weights_of_one(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(root), "ACCELERATE_USE_CPU": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    for name, start, count in (("two", launch, "2"), ("one", [sys.executable], "1")):
        arguments = [*start, str(script), str(tmp_path / name), "2", count]
        subprocess.run(arguments, cwd=root, env=environment, check=True, timeout=300)
    last = "step-00000004/model.safetensors"
    one, two = (load_file(tmp_path / name / last) for name in ("one", "two"))
    for key, tensor in one.items():
        assert tensor.allclose(two[key], atol=1e-5), key
