"""Kernels run by Triton's interpreter, in a process of its own.

Triton decides whether to interpret when it is imported, for all kernels of the process. What is to
be found out is written in `run_interpreter.py` of an op's folder: every public function in it is a
claim, and `check_claim` runs the one that the command line names.
"""

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


def check_in_interpreter(package: str, *arguments: str) -> None:
    """`run_interpreter` of a package under `tests.ops` must find nothing wrong."""
    result = subprocess.run(
        [sys.executable, "-m", f"tests.ops.{package}.run_interpreter", *arguments],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]


def imports(module: str, code: str) -> bool:
    """Whether code, run in a fresh process, ends up with a module loaded."""
    ask = f"{code}\nimport sys; sys.exit({module!r} in sys.modules)"
    return subprocess.run([sys.executable, "-c", ask], cwd=ROOT, check=False).returncode != 0


def poison_memory() -> None:
    """Let memory that nothing wrote read as NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_num_threads(1)


def claims_of(package: str) -> list[str]:
    """The claims of an op, read without importing its kernels."""
    source = (ROOT / "tests/ops" / package / "run_interpreter.py").read_text()
    functions = [x for x in ast.parse(source).body if isinstance(x, ast.FunctionDef)]
    return [function.name for function in functions if not function.name.startswith("_")]


def check_claim() -> None:
    """The claim that the command line names: `python -m ... run_interpreter CLAIM`."""
    poison_memory()
    getattr(sys.modules["__main__"], sys.argv[1])()
