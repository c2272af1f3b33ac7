"""The page of a run: everything in its folder, on one page that works offline.

What `pages/report.html` shows is put together here; that template says how, and escapes it.
"""

import base64
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vort.files import read_regular, write_atomically
from vort.lab.report.conditions import BY_LAG, Charts, Condition, conditions_of, differing
from vort.lab.report.folder import PICTURES, Json, Part, Run, mapping, read_run, rows_of
from vort.lab.report.standalone import shown, standalone_page
from vort.lab.report.tables import Entry, Grid, grid
from vort.lab.training.metrics import Interval
from vort.lab.verdicts import VERDICTS

__all__ = ["report_page", "write_report_page"]

LARGEST_PICTURE = 12_000_000
OURS = "ours"  # where a statement stands that is not the paper's
# Pictures for places that have no script, and the charts that show the same and more.
REPEATED = {"by_lag.png": BY_LAG}


def write_report_page(folder: Path, out: Path, order: Iterable[str] = ()) -> Run:
    """Write the page of a run folder to a file, and return what was read.

    order: names of experiments that come first on the page, as in `read_run`.
    """
    run = read_run(folder, order)
    page = report_page(run)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page)
    return run


def report_page(run: Run) -> str:
    """The page as text: summary, then a section for each experiment.

    Nothing in it comes from outside, and nothing in the run folder can act in it.
    """
    charts = Charts()
    sections = [
        _section(f"part-{index}", part, run, charts) for index, part in enumerate(run.parts, 1)
    ]
    paper, ours = (
        sum((_verdict_counts(part, own) for part in run.parts), Counter[str]())
        for own in (False, True)
    )
    cells = sum(len(part.cells) for part in run.parts)
    counted = [
        _plural(len(sections), "experiment"),
        _plural(paper.total(), "claim") + " of the paper" if paper else "",
        _plural(ours.total(), "statement") + " of our own" if ours else "",
        _plural(cells, "trained cell") if cells else "",
    ]
    return standalone_page(
        "report.html",
        title=f"VORT report: {run.folder.resolve().name}",
        styles=["base.css", "report.css"],
        scripts=["report_charts.js", "report.js"],
        data={"charts": charts.specs},
        subtitle=", ".join(filter(None, counted)),
        tallies=[
            (title, [(n, name or "without a verdict", _tone(name)) for name, n in found])
            for title, found in (
                (f"{_plural(paper.total(), 'claim')} of the paper", _best_first(paper)),
                (f"{_plural(ours.total(), 'statement')} of our own", _best_first(ours)),
            )
            if found
        ],
        sections=sections,
    )


def _plural(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def _section(anchor: str, part: Part, run: Run, charts: Charts) -> dict[str, Any]:
    """What the template shows of one experiment."""
    summary, cells = part.summary, part.cells
    conditions = conditions_of(part, run.parts)
    plots = charts.of_conditions(conditions, mapping(summary.get("labels")))
    notes = summary.get("notes")
    # Before the problems are listed: a picture that cannot be read is one of them.
    pictures = _pictures(part, run, plots)
    settings = [_settings(cell) for cell in cells.values()]
    varied = set(differing(settings))
    return {
        "anchor": anchor,
        "title": part.title,
        "about": summary.get("about"),
        "command": summary.get("command"),
        "chips": _chips(part),
        "problems": part.problems,
        "notes": notes if isinstance(notes, list) else [],
        "verdicts": _verdicts(part, own=False),
        "statements": _verdicts(part, own=True),
        "sheets": _sheets(part),
        "scores": _scores(conditions),
        "plots": plots,
        "pictures": pictures,
        "settings": {k: v for k, v in settings[0].items() if k not in varied} if settings else {},
        "count": len(cells),
        "cells": _cells(part),
        "made_by": _made_by(part),
    }


def _chips(part: Part) -> list[Entry]:
    """Verdicts, cells and damage in a few words each."""
    chips = [
        Entry(f"{count} {'of ours: ' if own else ''}{name}", _tone(name))
        for own in (False, True)
        for name, count in _best_first(_verdict_counts(part, own))
    ]
    cells, bad = len(part.cells), len(part.problems)
    if cells:
        chips.append(Entry(_plural(cells, "cell"), "plain"))
    if bad:
        chips.append(Entry(f"{_plural(bad, 'file')} unread", "bad"))
    return chips


def _claims(part: Part, own: bool) -> list[Json]:
    """The paper's claims, or the statements of our own."""
    rows = rows_of(part.summary.get("verdicts"))
    return [row for row in rows if (row.get("where") == OURS) == own]


def _verdict_counts(part: Part, own: bool) -> Counter[str]:
    return Counter(str(row.get("verdict", "")) for row in _claims(part, own))


def _tone(verdict: str) -> str:
    return VERDICTS.get(verdict, "other")


def _best_first(counts: Counter[str]) -> list[tuple[str, int]]:
    order = {name: place for place, name in enumerate(VERDICTS)}
    return sorted(counts.items(), key=lambda item: (order.get(item[0], len(order)), item[0]))


def _verdict(words: str) -> Entry:
    """A verdict in its colour; the words say it too."""
    return Entry(words, _tone(words))


def _verdicts(part: Part, own: bool) -> Grid | None:
    """The paper's claims, or statements of our own, beside what was measured."""
    rows = _claims(part, own)
    if not rows:
        return None
    body = [
        [
            *(row.get(key, "") for key in ("where", "states", "measured")),
            _verdict(str(row.get("verdict", ""))),
            row.get("erratum", ""),
        ]
        for row in rows
    ]
    headings = ["where", "the paper", "measured", "verdict", "erratum"]
    if own:
        headings, body = ["statement", *headings[2:]], [row[1:] for row in body]
    if not any(row[-1] for row in body):
        headings, body = headings[:-1], [row[:-1] for row in body]
    return grid(headings, body, "cards statements" if own else "cards claims")


def _sheets(part: Part) -> list[tuple[Any, Grid]]:
    """The tables that the experiment wrote, with their titles."""
    sheets = []
    for sheet in rows_of(part.summary.get("sheets")):
        headings, rows = sheet.get("headings"), sheet.get("rows")
        if isinstance(headings, list) and isinstance(rows, list):
            body = [
                [_verdict(cell) if cell in VERDICTS else cell for cell in map(shown, row)]
                for row in rows
                if isinstance(row, list)
            ]
            sheets.append((sheet.get("title", "Table"), grid(headings, body)))
    return sheets


def _scores(conditions: list[Condition]) -> list[tuple[str, Grid]]:
    """Test scores by model and bucket, with the interval over seeds; the best are marked."""
    tables = []
    for condition in conditions:
        buckets = condition.buckets()
        if not buckets:
            continue
        best = {bucket: _best(condition, bucket) for bucket in buckets}
        rows = []
        for model, cells in condition.models.items():
            scores = [
                _score(condition, condition.score(model, bucket), model == best[bucket])
                for bucket in buckets
            ]
            sizes = [_one(cells, "parameters"), _one(cells, "state_numbers")]
            rows.append([model, *scores, len(cells), *sizes])
        unit = "bits" if condition.language else "accuracy, %"
        title = f"Test {unit}" + (f": {condition.name}" if condition.name else "")
        tables.append((title, grid(["model", *buckets, "seeds", "parameters", "state"], rows)))
    return tables


def _best(condition: Condition, bucket: str) -> str | None:
    scored = {model: condition.score(model, bucket) for model in condition.models}
    means = {model: score.mean for model, score in scored.items() if score is not None}
    if len(means) < 2:
        return None
    choose = min if condition.language else max
    return choose(means, key=lambda model: means[model])


def _score(condition: Condition, score: Interval | None, best: bool) -> Entry:
    if score is None:
        return Entry("")
    factor, digits = (1, 3) if condition.language else (100, 1)
    half = f" ± {score.half * factor:.{digits}f}" if score.count > 1 else ""
    return Entry(f"{score.mean * factor:.{digits}f}", half=half, best=best)


def _one(cells: list[Json], key: str) -> Any:
    return next((cell[key] for cell in cells if cell.get(key) is not None), None)


def _pictures(part: Part, run: Run, charts: Iterable[str]) -> list[dict[str, Any]]:
    """Pictures inside the page, with caption and command; none that repeats one of its charts."""
    drawn = set(charts)
    listed = {str(row.get("file")): row for row in rows_of(part.summary.get("figures"))}
    pictures = []
    for file in part.pictures:
        about = listed.get(file.name, {})
        content = None if REPEATED.get(file.name) in drawn else _content(file, part, run)
        if content is not None:
            pictures.append(
                {
                    "source": f"data:{PICTURES[file.suffix]};base64,{_base64(content)}",
                    "width": _width(content),
                    "caption": about.get("caption") or file.stem.replace("_", " "),
                    "command": about.get("command"),
                }
            )
    return pictures


def _content(picture: Path, part: Part, run: Run) -> bytes | None:
    """Of a picture in the run folder; None, and a line among the problems, where it is left out."""
    try:
        content = read_regular(picture, run.folder)
    except OSError as problem:
        part.problems.append(f"{part.name}/{picture.name}: {problem.strerror or problem}")
        return None
    if len(content) > LARGEST_PICTURE:
        size = f"{len(content) / 1e6:.0f} MB"
        part.problems.append(f"{part.name}/{picture.name} is left out: {size}")
        return None
    return content


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _width(content: bytes) -> int | None:
    """At which a PNG of ours has letters one can read: half of its pixels. None of other files."""
    if content[:8] != b"\x89PNG\r\n\x1a\n" or len(content) < 24:
        return None
    return min(4000, int.from_bytes(content[16:20], "big") // 2)


def _cells(part: Part) -> Grid | None:
    """Every cell in a row: what sets it apart, its scores, its cost."""
    cells = part.cells
    if not cells:
        return None
    flat = {name: _settings(cell) for name, cell in cells.items()}
    varied = [key for key in differing(flat.values()) if not key.startswith("cell ")]
    rows = []
    for name, cell in cells.items():
        test = mapping(cell.get("test"))
        total = mapping(test.get("all", next(iter(test.values()), None)))
        costs = ("parameters", "state_numbers", "tokens_per_second", "seconds")
        rows.append(
            [
                *(name, _rate(cell), total.get("accuracy"), total.get("bits")),
                *(cell.get(key) for key in costs),
                mapping(cell.get("made_by")).get("device"),
                *(flat[name].get(key, "") for key in varied),
            ]
        )
    headings = ["cell", "learning rate", "accuracy", "bits", "parameters", "state"]
    return grid([*headings, "tokens/s", "seconds", "device", *varied], rows)


def _settings(cell: Json) -> dict[str, str]:
    """Task, model and training settings of a cell on one level, as text."""
    flat = {}
    for part in ("scale", "task", "model", "training"):
        value = cell.get(part)
        if isinstance(value, dict):
            for key, item in value.items():
                flat[f"{part}.{key}"] = "none" if item is None else shown(item)
        elif value is not None:
            flat[part] = shown(value)
    return flat


def _rate(cell: Json) -> str:
    rate = mapping(cell.get("training")).get("learning_rate")
    return "" if rate is None else shown(rate)


def _made_by(part: Part) -> dict[str, str]:
    """Everything that made the numbers: versions, machines, commands."""
    found: dict[str, dict[str, None]] = {}
    for source in (part.summary, *part.cells.values()):
        for key, value in mapping(source.get("made_by")).items():
            found.setdefault(str(key), {})[shown(value)] = None
    return {key: _several(list(values)) for key, values in found.items()}


def _several(values: list[str]) -> str:
    more = f"; and {len(values) - 6} more" if len(values) > 6 else ""
    return "; ".join(values[:6]) + more
