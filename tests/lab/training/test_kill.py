"""A run that is killed outright goes on as if nothing had happened."""

import json
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.forks import Forked, output_of
from vort.lab.training import latest_checkpoint

# Arguments: seconds a step rests, then directories to run in, one after another. A checkpoint at
# every step: most of the time is spent writing one, so that is where a kill strikes.
SCRIPT = """
import sys, time
import torch
torch.set_num_threads(1)
from tests.lab.training.tiny import TASK, Tiny, quick
from vort.lab.training import train

class Slow(Tiny):
    def forward(self, input_ids):
        time.sleep(float(sys.argv[1]))
        return super().forward(input_ids)

for directory in sys.argv[2:]:
    torch.manual_seed(0)
    config = quick(steps=30, checkpoint_every=1, evaluate_every=5, log_every=4)
    train(Slow(), TASK, config, directory=directory, resume=True)
"""


def kill_after(directory: Path, step: int, delay: float = 0.0) -> None:
    """Run or resume until a step is saved, then kill."""
    child = Forked(SCRIPT, 0.05, directory)
    try:
        deadline = time.monotonic() + 120
        while (found := latest_checkpoint(directory)) is None or found.name < f"step-{step:08d}":
            assert child.running(), "the run ended before it could be killed"
            assert time.monotonic() < deadline, "the run did not get anywhere"
            time.sleep(0.002)
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
    finally:
        child.end()
    killed = latest_checkpoint(directory)
    assert killed is not None
    assert killed.name < "step-00000030"
    assert not (directory / "result.json").exists()


def check_same_end(cut: Path, whole: Path) -> None:
    """Finish the one and run the other; compare all that they leave."""
    output_of(SCRIPT, 0, cut, whole)
    ends = [directory / "step-00000030" for directory in (cut, whole)]
    for name in ("model", "optimizer", "random"):
        first, second = (load_file(end / f"{name}.safetensors") for end in ends)
        assert first.keys() == second.keys()
        assert all(first[key].equal(second[key]) for key in first), name
    results = [json.loads((d / "result.json").read_text()) for d in (cut, whole)]
    for key in ("steps", "history", "validation", "test"):
        assert results[0][key] == results[1][key], key
    assert [path.name for path in cut.glob("step-*")] == ["step-00000030"]


def test_a_killed_run_resumes_to_the_same_weights_and_metrics(tmp_path: Path) -> None:
    kill_after(tmp_path / "cut", 7)
    check_same_end(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.slow
def test_many_kills_at_any_moment_change_nothing(tmp_path: Path) -> None:
    for step, delay in zip(
        (1, 4, 8, 12, 16), np.random.default_rng().uniform(0, 0.1, 5), strict=True
    ):
        kill_after(tmp_path / "cut", step, delay)
    check_same_end(tmp_path / "cut", tmp_path / "whole")
