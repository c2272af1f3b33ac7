"""Kernels run by Triton's interpreter, in a process of its own.

Triton decides whether to interpret when it is imported, for all kernels of the process. What is to
be found out is written in `run_interpreter.py` of an op's folder: every public function in it is a
claim, and `check_claim` runs the one that the command line names.

Loading torch, Triton and the models takes longer than most claims: a process that has them loaded
waits for claims, and each gets a fork of it.
"""

import ast
import atexit
import importlib
import importlib.util
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


def check_in_interpreter(package: str, *arguments: str) -> None:
    """`run_interpreter` of a package under `tests.ops` must find nothing wrong."""
    status, said = _run(True, f"tests.ops.{package}.run_interpreter", *arguments)
    assert status == 0, said[-4000:]


def imports(module: str, code: str) -> bool:
    """Whether code, run in a process that has torch and scipy alone, ends up with a module loaded.

    Code that breaks down has not shown that it does without.
    """
    status, said = _run(False, "tests.ops.interpreter", code, module)
    assert status in (0, 3), said[-2000:]
    return status == 3


def _run(interpret: bool, module: str, *arguments: str) -> tuple[int, str]:
    """Status and output of `python -m module arguments`, by a fork of a process that waits."""
    server = _server(interpret)
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps([module, *arguments]) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, f"the process for {module} died"
    status, said = json.loads(answer)
    return status, said


@cache
def _server(interpret: bool) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_INTERPRET": "1"} if interpret else {}
    loaded = ["torch", "scipy.special"]
    if interpret:  # the last two are what every launch, and torch.library.opcheck, would load
        loaded = ["triton", "vort.layers", "vort.models", "triton.experimental.gluon"]
        loaded.append("torch.testing._internal.optests")
    server = subprocess.Popen(
        [sys.executable, "-c", f"from tests.ops.interpreter import serve; serve({loaded!r})"],
        cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    atexit.register(server.communicate)  # which ends it
    return server


def serve(loaded: list[str]) -> None:
    """Run what comes on stdin, one after another, until it ends; statuses and output go to stdout.

    loaded: modules that every run is to find loaded.
    """
    for name in loaded:
        importlib.import_module(name)
    if "triton" in loaded:
        _patch_once()
        _remember_types()
        _leave_out_what_says_nothing()
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as output:
            child = os.fork()
            if child == 0:
                _as_main(json.loads(line), output.fileno())
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            output.seek(0)
            print(json.dumps([status, output.read()]), flush=True)


def _patch_once() -> None:
    """Have the interpreter replace Triton's language once a launch.

    It does so at every call of a function in a kernel, with what is in place already; that is half
    of all it does.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def patch_what_is_left(fn: Any) -> Any:
        languages = [x for x in fn.__globals__.values() if x is tl or x is tl.core]
        left = any(tl.core.is_builtin(language.load) for language in languages)
        return patch(fn) if left else interpreter._LangPatchScope()

    interpreter._patch_lang = patch_what_is_left


def _remember_types() -> None:
    """Have the interpreter describe each shape and type of numbers once, not for every number.

    A third of what is left of its time goes into descriptions that it has made before.
    """
    from triton.language import core
    from triton.runtime import interpreter

    describe, in_numpy = core.block_type.__init__, interpreter._get_np_dtype
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, Any] = {}
    kinds: dict[str, Any] = {}
    no_sizes = core.tuple([]), core.constexpr(1)

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        key = element_ty.name, sizes
        if key not in blocks:
            describe(self, element_ty, shape)
            if sizes not in shapes:
                whole = core.tuple([core.constexpr(size) for size in self.shape])
                shapes[sizes] = whole, core.constexpr(self.numel)
            blocks[key] = vars(self) | {"as_tensor": shapes[sizes]}
        vars(self).update(blocks[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.as_tensor if type.is_block() else no_sizes

    def kind(dtype: Any) -> Any:
        if dtype.name not in kinds:
            kinds[dtype.name] = in_numpy(dtype)
        return kinds[dtype.name]

    core.block_type.__init__ = block
    core.tensor.__init__ = tensor
    interpreter._get_np_dtype = kind


def _leave_out_what_says_nothing() -> None:
    """Have the interpreter compute what comes of it alone.

    It computes every sum and product of integers in int64 too, for asserts that are off, compares
    shapes that are one (see `_remember_types`) dimension by dimension, and goes through all types
    for the one of a result. That is two fifths of what is left.
    """
    from triton.language.semantic import TritonSemantic
    from triton.runtime.interpreter import interpreter_builder as builder

    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    broadcast, meet = TritonSemantic.broadcast_impl_value, TritonSemantic.computation_type_impl
    types: dict[Any, Any] = {}

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    def type_of_both(self: Any, *given: Any) -> Any:
        key = tuple([getattr(x, "name", x) for x in given])
        if key not in types:
            types[key] = meet(self, *given)
        return types[key]

    TritonSemantic.broadcast_impl_value = broadcast_others
    TritonSemantic.computation_type_impl = type_of_both


def _as_main(command: list[str], output: int) -> None:
    """Run a module as the program, in a fork, which ends here."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    status = 1
    try:
        sys.argv = command
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


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
    # One draw: of another a gradient may be so small that its rounding is above any bound.
    torch.manual_seed(0)
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


if __name__ == "__main__":  # see `imports`
    exec(sys.argv[1], {})
    sys.exit(3 * (sys.argv[2] in sys.modules))
