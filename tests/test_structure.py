"""The rooms of the house: imports point one way, and the core stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "vort"
# A room may import from itself and from the rooms after it.
ROOMS = (
    ("__main__",),
    ("cli",),
    ("lab.commands",),
    ("lab.experiments",),
    ("lab.report",),
    ("lab.evaluation",),
    ("lab.training",),
    ("lab.tasks", "lab.verdicts", "lab.processes", "lab.launcher"),
    ("distributed",),
    ("models", "plasticity"),
    ("sessions",),
    ("layers",),
    ("memories",),
    ("ops",),
    ("fractional",),
    ("files", "names", "pretrained", "threads"),  # what every room may use
)
FLOOR = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}


def room_of(names: list[str]) -> str:
    """The room that a module's names lead to, those after `vort`."""
    return ".".join(names[: 2 if names[0] == "lab" else 1])


def imported_rooms(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    parts = [name.split(".") for name in names]
    return {room_of(part[1:]) for part in parts if part[0] == "vort" and len(part) > 1}


@pytest.mark.parametrize(
    "path",
    # A model's folder brings a file of its own, which is for transformers to read.
    sorted(path for path in SOURCE.rglob("*.py") if path.name != "vort_auto.py"),
    ids=lambda path: str(path.relative_to(SOURCE)),
)
def test_imports_point_one_way(path: Path) -> None:
    room = room_of(list(path.relative_to(SOURCE).with_suffix("").parts))
    if room in ("__init__", "lab.__init__"):
        return
    assert room in FLOOR, f"{room} is not on the plan of CONTRIBUTING.md"
    for other in imported_rooms(path):
        assert FLOOR[other] >= FLOOR[room], f"{room} must not import {other}"


# In a process of its own, which has what torch loads and nothing else.
CORE = """
import importlib, sys, torch
known = set(sys.modules)
for module in ("vort", "vort.fractional", "vort.ops", "vort.pretrained", "vort.layers"):
    importlib.import_module(module)
    for name in {heavy!r}:
        if name in sys.modules and name not in known:
            print(module, "loads", name)
# Rows whose positions are looked at: outside of a graph, where there is one.
layer = sys.modules["vort.layers"].VortAttention(hidden_size=8, num_attention_heads=1)
layer(torch.zeros(1, 4, 8), position_ids=torch.tensor([[0, 1, 0, 1]]))
print("a call loads torch._dynamo" if "torch._dynamo" in sys.modules else "")
"""


def test_core_needs_only_torch_numpy_and_scipy_and_no_compiler() -> None:
    heavy = ["transformers", "triton", "matplotlib", "typer", "rich", "safetensors", "jinja2"]
    check = CORE.format(heavy=[*heavy, "torch._dynamo"])
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_no_file_names_a_machine_or_loads_a_pickle() -> None:
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        assert "torch.load(" not in text, path
        assert "pickle.load" not in text, path
