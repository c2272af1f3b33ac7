"""A run that is killed outright goes on as if nothing had happened."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from safetensors.torch import load_file

from vort.training import latest_checkpoint

SCRIPT = """
import sys, time
import torch
torch.set_num_threads(1)
from tests.training.tiny import TASK, quick, tiny
from vort.training import train

class Slow(type(tiny())):
    def forward(self, input_ids):
        time.sleep(float(sys.argv[2]))
        return super().forward(input_ids)

for directory, pause in zip(sys.argv[1::2], sys.argv[2::2]):
    sys.argv[2] = pause
    torch.manual_seed(0)
    config = quick(steps=30, checkpoint_every=1, evaluate_every=5, log_every=1)
    train(Slow(), TASK, config, directory=directory, resume=True)
"""


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-c", SCRIPT, *map(str, arguments)]


def test_a_killed_run_resumes_to_the_same_weights_and_metrics(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    child = subprocess.Popen(command(cut, 0.05), cwd=root, env=environment)
    try:
        deadline = time.monotonic() + 120
        while (found := latest_checkpoint(cut)) is None or found.name < "step-00000007":
            assert child.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline, "the run did not get anywhere"
            time.sleep(0.005)
        child.send_signal(signal.SIGKILL)
    finally:
        child.kill()
        child.wait()
    killed = latest_checkpoint(cut)
    assert killed is not None
    assert killed.name < "step-00000030"
    assert not (cut / "result.json").exists()

    # One process resumes the one and runs the other from start to end.
    subprocess.run(command(cut, 0, whole, 0), cwd=root, env=environment, check=True)
    ends = [directory / "step-00000030" for directory in (cut, whole)]
    for name in ("model", "optimizer", "random"):
        first, second = (load_file(end / f"{name}.safetensors") for end in ends)
        assert first.keys() == second.keys()
        assert all(first[key].equal(second[key]) for key in first), name
    results = [json.loads((d / "result.json").read_text()) for d in (cut, whole)]
    for key in ("steps", "history", "validation", "test"):
        assert results[0][key] == results[1][key], key
