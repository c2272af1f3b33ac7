"""The paper's figures: drawn from what a run has, left out with advice where it has nothing."""

import json
import re
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from vort.cli import app
from vort.lab.report.figures import PAPER_FIGURES, Need, read_records, write_captions
from vort.lab.report.figures.results import line_looks
from vort.lab.report.figures.style import canvas, figure

runner = CliRunner(env={"TERM": "dumb"})
KINDS = ["first", "filler", "again", "filler"] * 5


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vort.lab.commands.figures.console", Console(width=400))


def cell(experiment: str, seed: int = 0, **measured: Any) -> dict[str, Any]:
    """A cell as `vort reproduce` leaves it."""
    return {
        "experiment": experiment,
        "scale": "laptop",
        "cell": {"task": experiment, "model": "vort", "seed": seed},
        "fingerprint": "abc",
        "training": {"steps": 7},
        "made_by": {"command": f"vort reproduce --only {experiment}", "vort": "0.1.0"},
        **measured,
    }


def test_of_two_curves_of_one_colour_dash_and_marker_differ() -> None:
    looks = list(islice(line_looks(), 28))
    for one, other in combinations(looks, 2):
        if one["color"] == other["color"]:
            assert one["ls"] != other["ls"]
            assert one["marker"] != other["marker"]
    assert len({look["color"] for look in looks}) == 7


def orders() -> dict[str, Any]:
    layer = {
        name: {"count": 5, "mean": mean, "histogram": [0.025] * 40}
        for name, mean in (("first", 0.9), ("again", 0.5), ("filler", 0.2))
    }
    return {"bins": 40, "layers": [layer]}


def strip() -> dict[str, Any]:
    sources = [t - 2 if kind == "again" else None for t, kind in enumerate(KINDS)]
    layer = {"order": [[0.9, 0.2, 0.5, 0.2] * 5], "gate": [[0.5] * 20]}
    return {"sequence": 1, "start": 40, "kinds": KINDS, "sources": sources, "layers": [layer]}


def reads() -> dict[str, Any]:
    kinds = {
        name: {"count": count, "shares": [[0.2, 0.5, 0.3]], "levels": [[level, 1 - level]]}
        for name, count, level in (
            ("lag <=10", 1, 0.8),
            ("lag 10-100", 2, 0.5),
            ("lag >100", 5, 0.2),
            ("first", 9, 0.0),
            ("filler", 99, 1.0),
        )
    }
    layer = {"time_constants": [None, 100.0, 1.5], "kinds": kinds, "written": [[0.9, 0.1]]}
    return {"layers": [layer], "levels": 2}


def by_order() -> dict[str, Any]:
    rows = [{"order": order, "accuracy": [1.0, None], "count": [4, 0]} for order in (0.1, 0.5, 1.0)]
    return {"lags": [[1, 10], [11, 99]], "learned": rows[1:], "imposed": rows}


def plasticity() -> dict[str, Any]:
    means = {"first_mention": 0.9, "later_mention": 0.2, "filler": 0.1, "other": 0.1}
    names = ["first_mention", "filler", "later_mention", "filler"]
    example = {"kinds": names, "orders": [[0.5] * 4, [1, 0.1, 0.2, 0.1], [1, 0.1, 0.1, 0.1]]}
    runs = [{"seed": seed, "orders": [means, means], "example": example} for seed in (0, 1)]
    groups = {name: {"runs": runs} for name in ("with", "without", "refined")}
    return {**groups, "settings": {"seeds": [0, 1]}}


def write(folder: Path, record: dict[str, Any]) -> None:
    cells = folder / record["experiment"] / "cells"
    cells.mkdir(parents=True, exist_ok=True)
    (cells / f"vort-seed{record['cell']['seed']}.json").write_text(json.dumps(record))


def make_run(folder: Path) -> Path:
    looks = {"strip": strip(), "reads": reads(), "orders": orders()}
    write(folder, cell("pilot", by_order=by_order(), **looks))
    write(folder, cell("label_copy", **looks))
    write(folder, cell("plasticity", plasticity=plasticity()))
    return folder


def test_every_figure_that_needs_a_model_comes_as_png_and_svg_with_a_caption(
    tmp_path: Path,
) -> None:
    run, out = make_run(tmp_path / "run"), tmp_path / "out"
    names = [figure.name for figure in PAPER_FIGURES if figure.name != "kernels-soe"]
    result = runner.invoke(app, ["figures", str(run), "--out", str(out), "--only", ",".join(names)])
    assert result.exit_code == 0, result.output
    for name in names:
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (out / f"{name}.svg").read_text()
    captions = {entry["name"]: entry for entry in json.loads((out / "captions.json").read_text())}
    assert list(captions) == names
    origin = captions["diffusion-plasticity"]["measured"][0]
    assert origin["seeds"] == [0, 1]
    assert origin["command"] == "vort reproduce --only plasticity"
    assert {"torch", "vort", "command"} <= set(captions["overview"]["drawn"])
    page = (out / "captions.md").read_text()
    assert "pilot, laptop scale, seed 0, 7 steps: `vort reproduce --only pilot`" in page
    assert str(tmp_path) not in page


def test_a_figure_without_its_measurements_is_left_out_and_says_what_makes_them(
    tmp_path: Path,
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    write(run, cell("label_copy", orders=orders()))
    result = runner.invoke(
        app, ["figures", str(run), "--out", str(out), "--only", "overview,alpha-hist"]
    )
    assert result.exit_code == 0, result.output
    assert {file.name for file in out.glob("*.png")} == {"alpha-hist.png"}
    assert "overview: left out" in result.output
    advice = re.search(r"vort reproduce .*--only (\S+) --cells '\*-vort-\*seed0'", result.output)
    assert advice is not None
    assert advice[1] == "pilot,label_copy"


def test_four_kinds_of_query_are_the_cells_own_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.axes import Axes

    curves: dict[str, list[float]] = {}
    plot = Axes.plot

    def kept(axis: Any, *given: Any, **options: Any) -> Any:
        if options.get("label"):
            curves[options["label"]] = [float(x) for x in given[1]]
        return plot(axis, *given, **options)

    monkeypatch.setattr(Axes, "plot", kept)
    (overview,) = (figure for figure in PAPER_FIGURES if figure.name == "overview")
    overview.draw(tmp_path / "x.png", read_records(make_run(tmp_path), overview.needs))
    shown = {name: values[0] for name, values in curves.items()}
    assert shown["Zipf query, answer near"] == pytest.approx(0.8)
    assert shown["Zipf query, answer far"] == pytest.approx(0.2)
    assert shown["filler, asks for nothing"] == pytest.approx(1.0)
    # Of all lags, each as often as it is asked for.
    expected = (1 * 0.8 + 2 * 0.5 + 5 * 0.2) / 8
    assert shown["entity named again (copy)"] == pytest.approx(expected)


def test_a_cell_from_before_levels_were_measured_is_no_source_of_panel_c(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    old = reads()
    del old["levels"]
    write(run, cell("label_copy", strip=strip(), orders=orders(), reads=old))
    result = runner.invoke(
        app, ["figures", str(run), "--out", str(tmp_path / "out"), "--only", "overview,alpha-hist"]
    )
    assert "overview: left out" in result.output
    assert "lacks levels of reads of label_copy; make it with" in result.output


def test_the_router_fed_with_entities_stands_beside_the_one_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    panels: dict[str, Any] = {}
    monkeypatch.setattr(
        "vort.lab.report.figures.results.draw_orders",
        lambda path, tasks, kinds: panels.update(tasks),
    )
    (histogram,) = (figure for figure in PAPER_FIGURES if figure.name == "alpha-hist")
    for number, model in enumerate(("vort_no_entity", "vort_with_inputs", "vort_banks")):
        record = cell("ablations", seed=number, orders={**orders(), "bins": number})
        record["cell"]["model"] = model
        write(tmp_path, record)
    found = read_records(tmp_path, histogram.any_of)
    assert set(found) == {"ablations/vort_no_entity", "ablations/vort_with_inputs"}
    assert histogram.missing(found) == ()
    histogram.draw(tmp_path / "x.png", found)
    assert {name: panel["bins"] for name, panel in panels.items()} == {
        "label copy, entities not told": 0,
        "label copy, entities told": 1,
    }
    assert [str(need) for need in histogram.missing({})] == [
        "orders of pilot",
        "orders of books",
        "orders of label_copy",
    ]


def test_a_picture_drawn_before_keeps_its_caption(tmp_path: Path) -> None:
    old, new = ({"name": name, "files": [f"{name}.png"], "caption": name} for name in "ab")
    rest: dict[str, Any] = {"measured": [], "drawn": {"seed": None, "command": "vort figures"}}
    (tmp_path / "a.png").touch()
    write_captions(tmp_path, [{**old, **rest}])
    write_captions(tmp_path, [{**new, **rest}])
    assert [x["name"] for x in json.loads((tmp_path / "captions.json").read_text())] == ["a", "b"]
    assert "![a](a.png)" in (tmp_path / "captions.md").read_text()


def test_figures_can_be_named_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    result = runner.invoke(app, ["figures", str(tmp_path), "--only", "dreams"])
    assert result.exit_code == 2
    assert "got dreams" in result.output


def test_records_are_of_the_first_seed_that_has_what_is_needed(tmp_path: Path) -> None:
    write(tmp_path, cell("pilot", seed=0))
    write(tmp_path, cell("pilot", seed=2, strip=strip()))
    write(tmp_path, cell("pilot", seed=1, strip=strip()))
    other = cell("pilot", seed=3, strip=strip())
    other["cell"]["model"] = "mixture"
    write(tmp_path, other)
    (tmp_path / "pilot" / "cells" / "broken.json").write_text("{")
    found = read_records(tmp_path, [Need("pilot", "strip"), Need("books", "orders")])
    assert set(found) == {"pilot"}
    assert found["pilot"]["cell"]["seed"] == 1


def test_kernels_need_no_run() -> None:
    (kernels,) = (figure for figure in PAPER_FIGURES if figure.name == "kernels-soe")
    assert kernels.missing({}) == ()


def test_the_same_drawing_gives_the_same_file(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.svg", "b.svg")]
    for file in files:
        with figure(file, 2, 4, 2) as (left, _):
            left.plot([1, 2], [3, 4])
    assert files[0].read_bytes() == files[1].read_bytes()
    with pytest.raises(RuntimeError, match="half way"), canvas(tmp_path / "c.png", 2, 2):
        raise RuntimeError("half way")
    assert not (tmp_path / "c.png").exists()
