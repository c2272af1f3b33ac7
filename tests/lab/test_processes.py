"""Processes that work side by side are forks of one that has loaded what they need."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = """
import os, sys
from vort.lab.processes import begin_loading, processes

def tell(answers):
    answers.send(("colorsys" in sys.modules, os.getppid()))

if __name__ == "__main__":
    begin_loading(("colorsys", "torch"))
    assert "torch" not in sys.modules  # the other begins before this one has to
    context, quick = processes()
    assert quick
    for _ in range(2):
        here, there = context.Pipe()
        process = context.Process(target=tell, args=(there,))
        process.start()
        print(*here.recv())
        process.join()
"""


@pytest.mark.skipif(
    sys.platform != "linux" or torch.cuda.is_available(), reason="here each is started afresh"
)
def test_a_process_has_what_the_one_it_comes_from_has_loaded(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    (first, parent), (second, same) = (line.split() for line in run.stdout.splitlines())
    assert first == second == "True"
    assert parent == same
