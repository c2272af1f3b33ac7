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
    ("lab.tasks", "lab.verdicts"),
    ("distributed",),
    ("models", "plasticity"),
    ("layers",),
    ("memories",),
    ("ops",),
    ("fractional",),
    ("files", "names", "pretrained"),  # what every room may use
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


@pytest.mark.parametrize("module", ["vort", "vort.fractional", "vort.ops", "vort.pretrained"])
def test_core_imports_only_torch_numpy_and_scipy(module: str) -> None:
    heavy = ["transformers", "triton", "matplotlib", "typer", "rich", "safetensors", "plotly"]
    heavy.append("jinja2")
    check = f"import sys, torch; before = set(sys.modules); import {module}; "
    check += f"print([m for m in {heavy!r} if m in sys.modules and m not in before])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_file_names_a_machine_or_loads_a_pickle() -> None:
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        assert "torch.load(" not in text, path
        assert "pickle.load" not in text, path
