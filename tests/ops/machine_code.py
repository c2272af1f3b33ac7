"""Kernels compiled for Hopper without a GPU, and two faults looked for in what comes out.

Neither shows in the interpreter, and on a GPU only at times:

- A product reads shared memory by a wrong descriptor. ptxas 12.8, which Triton 3.6 and 3.7 carry,
  mixes up the two halves of a descriptor where tiles of different width lie at the same place one
  after another: it reads a uniform register that nothing wrote, or one that holds another's.
- A product reads what a pipelined load (cp.async) wrote, with no fence.proxy.async in between.
"""

import importlib
import os
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from inspect import isfunction
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

import vort.ops
from vort.ops.gpu.launcher import Tile

_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.bool: "*i1",
    torch.float64: "*fp64",
}


class Launch(NamedTuple):
    """All that a compiled form depends on."""

    module: str
    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[int, Any], ...]
    tile: Tile


class Code(NamedTuple):
    """A kernel in the assembler's language, and as the machine gets it."""

    ptx: str
    sass: str

    def faults(self) -> list[str]:
        return unfenced(self.ptx) + unwritten(self.sass) + misread(self.ptx, self.sass)

    def taken_apart(self) -> bool:
        """Whether each 16 columns of a product are waited for: right, and slow.

        The assembler does this to a whole kernel where it cannot follow an accumulator (its C7510
        to C7515); a product it leaves whole ends in one instruction that can be waited for.
        """
        ends = len(re.findall(r"\bHGMMA\S*\s.*\bgsb0\b", self.sass))
        return ends > self.ptx.count("wgmma.commit_group")


@contextmanager
def recorded() -> Iterator[dict[Launch, None]]:
    """Ops called in here run on the CPU and compute nothing: their launches are written down."""
    found: dict[Launch, None] = {}

    def record(kernel: Any, grid: int, *arguments: Any, tile: Tile, **constants: Any) -> None:
        if grid == 0:
            return
        types, fixed = [], []
        for i, name in enumerate(kernel.arg_names):
            if i < len(arguments) and arguments[i] is not None:
                types.append((name, _type_of(arguments[i])))
            else:
                types.append((name, "constexpr"))
                fixed.append((i, None if i < len(arguments) else constants[name]))
        fn = kernel.fn
        found[Launch(fn.__module__, fn.__name__, tuple(types), tuple(fixed), tile)] = None

    def accept(*_: Any) -> None:
        """Any device will do."""

    with ExitStack() as patches:
        for info in pkgutil.walk_packages(vort.ops.__path__, "vort.ops."):
            module = importlib.import_module(info.name)
            for name, stand_in in (("launch", record), ("require_kernels", accept)):
                if isfunction(getattr(module, name, None)):
                    patches.enter_context(mock.patch.object(module, name, stand_in))
        yield found


def _type_of(argument: Any) -> str:
    if isinstance(argument, torch.Tensor):
        return _TYPES[argument.dtype]
    return "i32" if isinstance(argument, int) else "fp32"


def compiled(launch: Launch) -> Code:
    """A launch's kernel, compiled for Hopper."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(launch.module), launch.kernel)
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (_, kind) in enumerate(launch.signature)
        if kind.startswith("*")
    }
    constants = {(i,): value for i, value in launch.constants}
    source = ASTSource(kernel, dict(launch.signature), constants, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch.tile.options())
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    descriptor, path = tempfile.mkstemp(suffix=".cubin")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(made.asm["cubin"])
        listing = [str(tools / "nvdisasm"), "-c", path]
        sass = subprocess.run(listing, capture_output=True, text=True, check=True).stdout
    finally:
        os.unlink(path)
    return Code(made.asm["ptx"], sass)


def unfenced(ptx: str) -> list[str]:
    """Products after a loop's wait for its pipelined loads, with no fence between.

    A wait with no load after it in its loop only ends the loop before: nothing reads those loads.
    """
    lines = [line.strip() for line in ptx.splitlines()]
    loads = [i for i, line in enumerate(lines) if line.startswith("cp.async.c")]
    loops = _loops(lines)
    found, waited = [], False
    for i, line in enumerate(lines):
        if line.startswith("cp.async.wait"):
            around = min((loop for loop in loops if i in loop), key=len, default=range(0))
            waited = waited or any(j in around and j > i for j in loads)
        elif "fence.proxy.async" in line:
            waited = False
        elif line.startswith("wgmma.mma_async") and waited:
            found.append(f"no fence before {line[:60]}")
    return found


def _loops(lines: list[str]) -> list[range]:
    """Lines from a label to a branch back to it."""
    labels: dict[str, int] = {}
    found = []
    for i, line in enumerate(lines):
        if label := re.match(r"(\$\w+):", line):
            labels[label.group(1)] = i
        elif (branch := re.search(r"\bbra\S*\s+(\$\w+);", line)) and branch.group(1) in labels:
            found.append(range(labels[branch.group(1)], i))
    return found


def _instructions(sass: str) -> Iterator[tuple[str, str, list[str]]]:
    """Every line of a listing: its text, operation and operands, these without a predicate."""
    for match in re.finditer(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", sass):
        text = match.group(1).strip()
        operation, _, rest = re.sub(r"^@!?U?PT?\d*\s+", "", text).partition(" ")
        yield text, operation, [operand.strip() for operand in rest.split(",")]


def unwritten(sass: str) -> list[str]:
    """Instructions that read a uniform register which none before them wrote."""
    found: list[str] = []
    written: set[int] = set()
    for text, operation, operands in _instructions(sass):
        # a logical operation may name a predicate first
        place = 1 if operation.startswith("ULOP3") and operands[0].startswith("UP") else 0
        target = re.fullmatch(r"UR(\d+)", operands[place]) if place < len(operands) else None
        sources = [
            (i, x) for i, x in enumerate(operands) if i > place or (i == place and not target)
        ]
        read = set().union(*(_read(operation, i, x) for i, x in sources))
        if not read <= written:
            found.append(f"read but not written: {text}")
        if target:
            number = int(target.group(1))
            pair = re.search(r"\.64(\.|$)|\.WIDE", operation)
            written |= {number, number + 1} if pair else {number}
    return found


def misread(ptx: str, sass: str) -> list[str]:
    """Products whose descriptor's upper half is none of those the kernel was written with.

    It holds strides and the kind of swizzle, all constants; addresses are in the lower half and
    never carry into it. Follows constants from line to line; what it cannot follow passes.
    """
    written = {
        (int(number) >> 32) & 0xFFFFFFFF
        for number in re.findall(r"(?:or|add)\.[bs]64\s.*, (-?\d{15,});", ptx)
    }
    found: list[str] = []
    known: dict[int, int | None] = {}
    for text, operation, operands in _instructions(sass):
        if operation.startswith("HGMMA"):
            place, first = next(
                (i, int(m.group(1)))
                for i, x in enumerate(operands)
                if (m := re.match(r"gdesc\[UR(\d+)\]", x))
            )
            halves = [first + 3] if place == 2 else [first + 1, first + 3]
            values = [known.get(half) for half in halves]
            if any(value is not None and value not in written for value in values):
                found.append(f"a descriptor of {[hex(v) for v in values if v is not None]}: {text}")
        elif target := re.fullmatch(r"UR(\d+)", operands[0]):
            number = int(target.group(1))
            # carries come and go in predicates
            terms = [x for x in operands[1:] if not x.lstrip("!").startswith("UP")]
            pair = re.search(r"\.64(\.|$)|\.WIDE", operation)
            if operation.startswith("UIADD3.64"):
                small = all(re.fullmatch(r"URZ|-?0x[0-9a-f]{1,4}", term) for term in terms[1:])
                known[number + 1] = _constant(terms[0], known, 1) if small else None
                known[number] = None
            elif operation.startswith(("UMOV", "UIADD3")) and not text.startswith("@"):
                values = [_constant(term, known) for term in terms]
                total = None if None in values else sum(v for v in values if v is not None)
                known[number] = None if total is None else total & 0xFFFFFFFF
            else:
                known[number] = None
                if pair:
                    known[number + 1] = None
    return found


def _constant(term: str, known: dict[int, int | None], half: int = 0) -> int | None:
    """What an operand holds, if that is known."""
    if term == "URZ":
        return 0
    if register := re.fullmatch(r"UR(\d+)", term):
        return known.get(int(register.group(1)) + half)
    return int(term, 16) if re.fullmatch(r"-?0x[0-9a-f]+", term) else None


def _read(operation: str, place: int, operand: str) -> set[int]:
    """Uniform registers that an operand reads."""
    found: set[int] = set()
    for kind, number in re.findall(r"(gdesc|desc)?\[?(?<![A-Z0-9])UR(\d+)", operand):
        first, count = int(number), 1
        if kind == "gdesc":
            # two addresses of two registers; in third place the first factor needs none
            first, count = (first + 2, 2) if place == 2 else (first, 4)
        elif kind == "desc" or re.search(r"^U.*\.64(\.|$)", operation):
            # a place among the kernel's arguments is one register, whatever is loaded from there
            count = 1 if operand.startswith("c[") else 2
        found |= set(range(first, first + count))
    return found
