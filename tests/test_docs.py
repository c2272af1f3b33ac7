"""Every Python block of README and the docs runs, in order, as a reader would run it."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import yaml

import vort
from vort.memories import MEMORIES, LayerSettings

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_run(page: Path) -> None:
    names: dict[str, object] = {}
    for block in BLOCK.findall(page.read_text()):
        exec(compile(block, page.name, "exec"), names)


def lines_of(block: str) -> list[str]:
    return [line for line in block.splitlines() if line.strip()]


def section(page: Path, title: str) -> str:
    """What stands under a heading of second rank."""
    return page.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_readme_takes_a_newcomer_from_installing_to_generating_before_any_figure() -> None:
    text = README.read_text()
    steps = [
        "](https://arxiv.org/abs/",
        "**Who it is for.**",
        "**When not to use it.**",
        "\n## Install\n",
        "\n## The layer in your own module\n",
        "\n## A model in ten lines\n",
        "\n## Train on your text\n",
        "\n## Generate\n",
        "\n## Results\n",
        "\n## Speed\n",
    ]
    places = [text.index(step) for step in steps]
    assert places == sorted(places)
    assert "pip install '.[lab]'" in section(README, "Install")
    assert "pip wheel" in section(README, "Install")
    assert "vort train --text" in section(README, "Train on your text")
    assert "vort generate run" in section(README, "Generate")


def test_pages_name_all_memories_and_count_them_right() -> None:
    for text in (
        (ROOT / "docs" / "model.md").read_text(),
        (ROOT / "docs" / "own-memory.md").read_text(),
        str(LayerSettings.__doc__),
    ):
        named = {name for name in MEMORIES if re.search(rf"[`\"]{name}[`\"]", text)}
        assert named | {"vort"} == set(MEMORIES)
    words = {10: "ten", 11: "eleven", 12: "twelve", 13: "thirteen", 14: "fourteen"}
    for page in (README, ROOT / "docs" / "index.md"):
        assert f"{words[len(MEMORIES) - 1]} other memories" in page.read_text()
    assert f"are {words[len(MEMORIES)]} such" in (ROOT / "docs" / "own-memory.md").read_text()


def test_the_map_of_the_house_names_every_page() -> None:
    nav = (ROOT / "mkdocs.yml").read_text()
    index = (ROOT / "docs" / "index.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f": {page.name}\n" in nav
        assert page.name == "index.md" or f"]({page.name})" in index


def test_readme_examples_are_short_and_the_model_has_ten_lines() -> None:
    (model,) = BLOCK.findall(section(README, "A model in ten lines"))
    assert len(lines_of(model)) <= 10
    (layer,) = BLOCK.findall(section(README, "The layer in your own module"))
    assert len(lines_of(layer)) <= 15


@pytest.mark.parametrize("title", ["Results", "Speed"])
def test_results_and_speed_have_one_table_each(title: str) -> None:
    assert len(re.findall(r"^\|(?: *:?-+:? *\|)+$", section(README, title), re.MULTILINE)) == 1


def test_the_citation_links_the_paper_as_readme_does() -> None:
    (link,) = set(re.findall(r"https://arxiv\.org/abs/[\d.]+", README.read_text()))
    assert link in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize("name", ["index.md", "quick-start.md"])
def test_docs_begin_with_a_command_that_trains_on_a_short_text(name: str) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "docs" / name).read_text(), re.M | re.S)
    first = next(line for block in blocks for line in block.splitlines() if "vort " in line)
    assert first.partition("#")[0].strip() == "vort train --text README.md --out run"
    nav = [*yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]]
    assert [next(iter(page.values())) for page in nav[:2]] == ["index.md", "quick-start.md"]


def test_the_first_command_of_the_docs_reads_no_more_than_two_minutes_worth() -> None:
    from vort.lab.training.sizes import TEXT_SIZES, settings_for_text

    class Text:
        """README, split as `vort train` does."""

        def characters(self, split: str) -> int:
            share = {"train": 0.85, "validation": 0.05, "test": 0.1}[split]
            return int(share * README.stat().st_size)

    found = settings_for_text(Text(), TEXT_SIZES["tiny"], {})  # type: ignore[arg-type]
    # One core of a busy machine took in 3,900 tokens a second; two minutes are for two.
    assert found["steps"] * found["batch_size"] * found["length"] <= 120 * 3_000


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
