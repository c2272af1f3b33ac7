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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

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


@contextmanager
def kernels_everywhere(wanted: bool) -> Iterator[None]:
    """As on a GPU: everything that kernels can take, they take."""
    import vort.layers  # noqa: F401

    def take(*tensors: Tensor) -> bool:
        return wanted and all(x.dtype == torch.float32 for x in tensors)

    modules = [m for n, m in sys.modules.items() if n.startswith("vort.")]
    changed = [m for m in modules if hasattr(m, "kernels_take")]
    kept = [m.kernels_take for m in changed]
    interface = sys.modules["vort.ops.retention.interface"]
    choose = interface._choose
    for module in changed:
        module.kernels_take = take
    if wanted:
        interface._choose = lambda *given: ("triton", "asked for")
    yield
    for module, function in zip(changed, kept, strict=True):
        module.kernels_take = function
    interface._choose = choose
