"""Every Python block of README and the docs runs, in order, as a reader would run it."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import vort

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_run(page: Path) -> None:
    names: dict[str, object] = {}
    for block in BLOCK.findall(page.read_text()):
        exec(compile(block, page.name, "exec"), names)


def test_readme_example_is_fifteen_lines_or_less() -> None:
    (example,) = BLOCK.findall((ROOT / "README.md").read_text())
    assert len([line for line in example.splitlines() if line.strip()]) <= 15


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_exist(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def modules() -> list[str]:
    found = pkgutil.walk_packages(vort.__path__, "vort.")
    return sorted(info.name for info in found if ".triton" not in info.name)


@pytest.mark.parametrize("name", modules())
def test_docstring_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    names = {"torch": importlib.import_module("torch"), **vars(module)}
    assert doctest.testmod(module, extraglobs=names).failed == 0
