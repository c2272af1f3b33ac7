"""The report page from a run folder: complete, patient with damage, deaf to what files say."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.lab.report.cases import PIXEL, cell_of, make_run, write
from tests.test_cli import plain
from vort.cli import app
from vort.lab.report.conditions import conditions_of
from vort.lab.report.folder import read_run
from vort.lab.report.run_page import report_page
from vort.lab.report.standalone import shown
from vort.lab.report.tables import grid

runner = CliRunner(env={"TERM": "dumb"})


def words_of(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page.split("<body>")[1]))


def test_page_holds_every_part_of_a_run(tmp_path: Path) -> None:
    page = report_page(read_run(make_run(tmp_path)))
    words = words_of(page)
    for part in (
        "2 experiments, 4 claims of the paper, 18 trained cells",
        "4 claims of the paper 1 reproduced 2 reproduced once corrected 1 not reproduced",
        "Zipf retrieval (table pilot)",
        "vort reproduce --only pilot --scale laptop --seeds 3",
        "62.8 % ± 1.5, 26 points above",
        "Against the paper, beta = 1",
        "Test scores of every condition",
        "Test accuracy, %: beta 1.0",
        "Accuracy by lag: beta 1.5",
        "Learned orders",
        "Settings that all 18 cells share",
        "All 18 cells",
        "0.0003",
        "torch 2.13",
        "shared rates 8 8 0.0041",
    ):
        expected = part.replace(">", "&gt;")
        assert expected in words, part
    assert "data:image/png;base64," in page


def test_scores_are_means_over_seeds_with_their_interval(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path))
    pilot = next(part for part in run.parts if part.name == "pilot")
    first, second = conditions_of(pilot)
    assert (first.name, second.name) == ("beta 1.0", "beta 1.5")
    score = first.score("vort", ">1000")
    assert score is not None
    seeds = [cell_of("vort", 1.0, seed)["test"][">1000"]["accuracy"] for seed in range(3)]
    assert score.mean == pytest.approx(sum(seeds) / 3)
    assert score.half == pytest.approx(4.303 * 0.004 / 3**0.5, rel=1e-3)
    lags = first.lags()["vort"]
    assert lags[6][4] == "lags 64 to 127"
    assert lags[6][2] < lags[6][1] < lags[6][3]
    assert set(first.losses()) == set(first.validation()) == set(first.models)


def test_statements_of_our_own_are_counted_apart_from_the_papers_claims(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    summary = json.loads((run / "kernel" / "summary.json").read_text())
    own = {"where": "ours", "states": "8 rates suffice", "measured": "they do", "verdict": "holds"}
    write(run / "kernel" / "summary.json", {**summary, "verdicts": [*summary["verdicts"], own]})
    page = report_page(read_run(run))
    words = words_of(page)
    assert "4 claims of the paper, 1 statement of our own" in words
    assert "1 not reproduced 1 statement of our own 1 holds" in words
    assert "1 of ours: holds" in words
    claims, statements = re.findall(
        r'<table class="cards (?:claims|statements)">.*?</table>', page, re.DOTALL
    )[:2]
    assert "8 rates suffice" not in claims
    assert "8 rates suffice" in statements


def ablations(folder: Path, count: int) -> Path:
    """A part with so many variants, which borrows VORT of the pilot at beta 1."""
    pilot = make_run(folder) / "pilot"
    for file in (pilot / "cells").glob("*.json"):
        write(file, {**json.loads(file.read_text()), "fingerprint": file.stem})
    part = folder / "ablations"
    (part / "cells").mkdir(parents=True)
    labels = {"vort": "VORT (ours)"}
    for number in range(count):
        cell = cell_of("mixture", 1.0, 0)
        cell["cell"] = {"task": "zipf_retrieval", "model": f"variant_{number}", "seed": 0}
        write(part / "cells" / f"v{number}.json", cell)
        labels[f"variant_{number}"] = f"Variant {number}"
    write(part / "summary.json", {"labels": labels, "borrowed": ["vort-b1.0-s0", 3, "../x"]})
    return folder


def test_ablations_are_drawn_beside_vort_and_no_two_lines_alike(tmp_path: Path) -> None:
    page = report_page(read_run(ablations(tmp_path, 12)))
    charts = Seen(page).data["charts"]
    (chart,) = [c for c in charts if c["title"] == "Accuracy by lag"]
    assert [line["name"] for line in chart["series"]][:2] == ["VORT (ours)", "Variant 0"]
    assert len(chart["series"]) == 13
    looks = [line["look"] for line in chart["series"]]
    assert len(set(looks)) == 13
    assert looks[0] == 0
    for other in charts:
        for line in other["series"]:
            assert (line["look"] == 0) == (line["name"].lower() in ("vort", "vort (ours)"))


def test_a_picture_that_a_chart_repeats_is_left_out_where_there_is_the_chart(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path)
    for part in ("pilot", "kernel"):
        (run / part / "by_lag.png").write_bytes(PIXEL)
    alts = [value for name, value in Seen(report_page(read_run(run))).attributes if name == "alt"]
    assert sorted(map(str, alts)) == ["Learned orders", "by lag"]  # the kernel part has no cells


def test_a_line_of_the_picture_is_in_the_chart_too(tmp_path: Path) -> None:
    file = make_run(tmp_path) / "pilot" / "cells" / "mixture-b1.0-s0.json"
    cell = json.loads(file.read_text())
    write(file, {**cell, "h2o": {"lags": cell["lags"], "test": cell["test"]}})
    charts = Seen(report_page(read_run(tmp_path))).data["charts"]
    names = [line["name"] for line in charts[0]["series"]]
    assert names == ["vort", "exponential", "mixture", "attention, H2O cache"]


def test_what_turns_text_around_is_shown_in_commands(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    summary = json.loads((run / "kernel" / "summary.json").read_text())
    bad = "vort report \u202egnp.exe\u2066\nrm -r ~"
    write(run / "kernel" / "summary.json", {**summary, "command": bad, "made_by": {"command": bad}})
    page = report_page(read_run(run))
    assert page.count("vort report ⟨U+202E⟩gnp.exe⟨U+2066⟩↵rm -r ~") == 2
    assert "\u202e" not in page
    assert "\u2066" not in page


def test_language_is_scored_in_bits(tmp_path: Path) -> None:
    cell = cell_of("vort", 1.0, 0)
    cell["cell"]["task"] = "books"
    (tmp_path / "pg19" / "cells").mkdir(parents=True)
    write(tmp_path / "pg19" / "cells" / "a.json", cell)
    assert "Test bits" in words_of(report_page(read_run(tmp_path)))


def test_damage_is_named_and_stops_nothing(tmp_path: Path) -> None:
    pilot = make_run(tmp_path) / "pilot"
    (pilot / "cells" / "vort-b1.0-s0.json").write_text('{"cell": {"mod')
    (pilot / "cells" / "odd.json").write_text("[1, 2]")
    (tmp_path / "kernel" / "summary.json").write_bytes(b"\xff\x00")
    (pilot / "orders.png").unlink()
    run = read_run(tmp_path)
    words = words_of(report_page(run))
    assert "pilot/cells/vort-b1.0-s0.json could not be read" in words
    assert "pilot/cells/odd.json holds a list, not an object" in words
    assert "kernel/summary.json could not be read" in words
    assert "the figure &#39;orders.png&#39; is not there" in words
    assert len(run.problems) == 4
    assert "All 17 cells" in words


@pytest.mark.parametrize("value", [None, 3, "text", [], {}, [None, 3, "x", [], {}], float("nan")])
def test_any_part_may_be_of_the_wrong_kind(tmp_path: Path, value: object) -> None:
    folder = tmp_path / "odd"
    (folder / "cells").mkdir(parents=True)
    whole = cell_of("vort", 1.0, 0)
    write(folder / "cells" / "empty.json", {})
    write(folder / "cells" / "whole.json", whole)
    for key in whole:
        write(folder / "cells" / f"{key}.json", {**whole, key: value})
    keys = ("title", "about", "command", "sheets", "figures", "verdicts", "notes", "made_by")
    for key in keys:
        write(folder / "summary.json", {key: value})
        report_page(read_run(tmp_path))
    write(folder / "summary.json", dict.fromkeys((*keys, "labels"), value))
    report_page(read_run(tmp_path))


class Seen(HTMLParser):
    """Text, attributes and scripts of a page, as a browser takes them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.data: Any = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script" and data.startswith("{"):
            self.data = json.loads(data)
        else:
            self.words.append(data)


@pytest.mark.parametrize(
    "bad",
    [
        "<script>alert(1)</script>\"'&",
        "</script><script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        '" onmouseover="alert(1)" \' onclick=\'alert(1)',
        "{{ 7*7 }}{% raw %}{# #}${7*7}",
        "<!-- </title></style></textarea>",
        "&lt;b&gt; &amp;amp; &#34;",
        "a\u2028b\u2029c",
    ],
)
def test_text_from_files_is_shown_as_it_is_and_does_nothing(tmp_path: Path, bad: str) -> None:
    folder = tmp_path / "evil"
    (folder / "cells").mkdir(parents=True)
    cell = json.loads(json.dumps(cell_of("vort", 1.0, 0)).replace('"vort"', json.dumps(bad)))
    write(folder / "cells" / "c.json", cell)
    row = dict.fromkeys(("where", "states", "measured", "verdict", "erratum"), bad)
    (folder / "picture.png").write_bytes(PIXEL)
    write(
        folder / "summary.json",
        {
            **dict.fromkeys(("title", "about", "command"), bad),
            "notes": [bad],
            "verdicts": [row],
            "sheets": [{"title": bad, "headings": [bad], "rows": [[bad]]}],
            "figures": [
                {"file": "../../../etc/passwd", "caption": bad, "command": bad},
                {"file": "picture.png", "caption": bad, "command": bad},
            ],
            "made_by": {bad: bad},
        },
    )
    page = report_page(read_run(tmp_path))
    seen = Seen(page)
    harmless = Seen(report_page(read_run(make_run(tmp_path / "harmless"))))
    assert page.count("<script") == page.count("</script>") == 2
    assert set(seen.tags) <= set(harmless.tags) | {"p"}
    assert {name for name, _ in seen.attributes} <= {name for name, _ in harmless.attributes}
    # Two in the contents, then everything that the summary and the cell hold.
    assert sum(words == bad for words in seen.words) >= 18
    assert ("alt", bad) in seen.attributes
    assert ("data-label", bad) in seen.attributes
    assert {series["name"] for chart in seen.data["charts"] for series in chart["series"]} == {bad}
    assert "root:" not in page


def test_folders_and_files_may_have_any_name(tmp_path: Path) -> None:
    run = tmp_path / "\"><b onclick='x'>{{ 7*7 }}"
    (run / "<i>").mkdir(parents=True)
    (run / "<i>" / "'\"><u>.png").write_bytes(PIXEL)
    write(run / "<i>" / "summary.json", {})
    seen = Seen(report_page(read_run(run)))
    assert not {"b", "i", "u"} & set(seen.tags)
    assert f"VORT report: {run.name}" in seen.words
    assert ("alt", "'\"><u>") in seen.attributes


def test_figures_stand_to_the_right_and_names_do_not(tmp_path: Path) -> None:
    headings = ["a", "score", "erratum"]
    rows = [["x", "93.0 ± 0.4", "E1"], ["y", "", "E2, E3"]]
    assert grid(headings, rows).figures == {1}
    (tmp_path / "part").mkdir()
    sheet = {"title": "t", "headings": headings, "rows": rows}
    write(tmp_path / "part" / "summary.json", {"sheets": [sheet]})
    page = report_page(read_run(tmp_path))
    assert page.count('class="n"') == 3
    assert '<td data-label="erratum">E1</td>' in page
    assert shown(12345) == "12,345"


def test_command_writes_into_the_run_folder_or_elsewhere(tmp_path: Path) -> None:
    make_run(tmp_path)
    result = runner.invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "report.html").stat().st_size > 30_000
    other = tmp_path / "other" / "page.html"
    assert runner.invoke(app, ["report", str(tmp_path), "--out", str(other)]).exit_code == 0
    assert other.exists()


@pytest.mark.parametrize(
    ("make", "message"), [(False, "is not a folder"), (True, "holds no experiment")]
)
def test_command_explains_a_folder_without_a_run(tmp_path: Path, make: bool, message: str) -> None:
    folder = tmp_path / "x"
    if make:
        folder.mkdir()
    result = runner.invoke(app, ["report", str(folder)])
    assert result.exit_code == 2
    assert message in " ".join(plain(result.output).replace("│", " ").split())
