"""The parts of one experiment's section: verdicts, tables, scores, figures, settings, versions."""

import base64
from collections import Counter
from html import escape
from pathlib import Path
from typing import Any

from vort.lab.report.html.markup import Markup, join, number, table, tag
from vort.lab.report.html.run_directory import PICTURES, Experiment, Json, mapping, rows_of
from vort.lab.report.html.scores import Condition, differing
from vort.lab.training.metrics import Interval

__all__ = [
    "VERDICTS",
    "cells_part",
    "command_line",
    "figures_part",
    "notes_part",
    "scores_part",
    "settings_part",
    "sheets_part",
    "verdict_chip",
    "verdict_counts",
    "verdicts_part",
    "versions_part",
]

VERDICTS = {
    "exceeded": "good",
    "reproduced": "good",
    "reproduced in part": "fair",
    "reproduced once corrected": "fair",
    "not reproduced": "bad",
    "holds": "good",
    "does not hold": "bad",
}
LARGEST_PICTURE = 12_000_000


def verdict_counts(experiment: Experiment) -> Counter[str]:
    """How many claims ended in each verdict."""
    rows = rows_of(experiment.summary.get("verdicts"))
    return Counter(str(row.get("verdict", "")) for row in rows)


def verdict_chip(verdict: str, count: int | None = None) -> Markup:
    """A verdict in its colour; the words say it too."""
    words = verdict if count is None else f"{count} {verdict}"
    return tag("span", words, class_=f"chip {VERDICTS.get(verdict, 'other')}")


def verdicts_part(experiment: Experiment) -> Markup:
    """The paper's claims beside what was measured."""
    rows = rows_of(experiment.summary.get("verdicts"))
    if not rows:
        return Markup()
    body = [
        [
            row.get("where", ""),
            row.get("states", ""),
            row.get("measured", ""),
            verdict_chip(str(row.get("verdict", ""))),
            row.get("erratum", ""),
        ]
        for row in rows
    ]
    headings = ["where", "the paper", "measured", "verdict", "erratum"]
    if not any(row[-1] for row in body):
        headings, body = headings[:-1], [row[:-1] for row in body]
    return join([tag("h3", "Verdicts"), table(headings, body, "cards claims")])


def sheets_part(experiment: Experiment) -> Markup:
    """The tables that the experiment wrote."""
    parts = []
    for sheet in rows_of(experiment.summary.get("sheets")):
        headings = sheet.get("headings")
        rows = sheet.get("rows")
        if not isinstance(headings, list) or not isinstance(rows, list):
            continue
        body = [
            [verdict_chip(c) if c in VERDICTS else c for c in map(_flat, row)]
            for row in rows
            if isinstance(row, list)
        ]
        parts += [tag("h3", sheet.get("title", "Table")), table(headings, body)]
    return join(parts)


def scores_part(conditions: list[Condition], *, aside: bool) -> Markup:
    """Test scores by model and bucket, with the interval over seeds; the best in bold.

    With `aside` they are folded up: the experiment has tables of its own.
    """
    parts = []
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
        headings = ["model", *buckets, "seeds", "parameters", "state"]
        parts += [tag("h3", title), table(headings, rows)]
    if parts:
        parts.append(tag("p", "± is half of the 95 % interval over seeds.", class_="fine"))
    if parts and aside:
        return tag("details", tag("summary", "Test scores of every condition"), *parts)
    return join(parts)


def figures_part(experiment: Experiment) -> Markup:
    """Pictures inside the page, with caption and command."""
    listed = {str(row.get("file")): row for row in rows_of(experiment.summary.get("figures"))}
    parts = []
    for picture in experiment.pictures:
        about = listed.get(picture.name, {})
        caption = about.get("caption") or picture.stem.replace("_", " ")
        lines = [tag("p", caption)]
        if about.get("command"):
            lines.append(command_line(str(about["command"])))
        source = _data_uri(picture, experiment)
        if source is not None:
            image = Markup(f'<img src="{source}" alt="{escape(str(caption))}">')
            parts.append(tag("figure", image, tag("figcaption", *lines), class_="picture"))
    return join([tag("h3", "Figures"), *parts]) if parts else Markup()


def notes_part(experiment: Experiment) -> Markup:
    """What the experiment says about itself, and what could not be read."""
    notes = experiment.summary.get("notes")
    lines = [tag("li", note) for note in notes] if isinstance(notes, list) else []
    problems = [tag("p", problem, class_="problem") for problem in experiment.problems]
    return join([*problems, tag("ul", *lines, class_="notes") if lines else ""])


def settings_part(experiment: Experiment) -> Markup:
    """Settings that all cells share; those that differ stand with the cells."""
    flat = [_settings(cell) for cell in experiment.cells.values()]
    if not flat:
        return Markup()
    varied = set(differing(flat))
    shared = {key: value for key, value in flat[0].items() if key not in varied}
    rows = [tag("div", tag("dt", key), tag("dd", value)) for key, value in shared.items()]
    title = f"Settings that all {len(flat)} cells share"
    return tag("details", tag("summary", title), tag("dl", *rows, class_="settings"))


def cells_part(experiment: Experiment) -> Markup:
    """Every cell in a row: what sets it apart, its scores, its cost."""
    cells = experiment.cells
    if not cells:
        return Markup()
    flat = {name: _settings(cell) for name, cell in cells.items()}
    varied = [key for key in differing(flat.values()) if not key.startswith("cell ")]
    rows = []
    for name, cell in cells.items():
        test = mapping(cell.get("test"))
        total = mapping(test.get("all", next(iter(test.values()), None)))
        rows.append(
            [
                name,
                _rate(cell),
                total.get("accuracy"),
                total.get("bits"),
                cell.get("parameters"),
                cell.get("state_numbers"),
                cell.get("tokens_per_second"),
                cell.get("seconds"),
                mapping(cell.get("made_by")).get("device"),
                *(flat[name].get(key, "") for key in varied),
            ]
        )
    headings = ["cell", "learning rate", "accuracy", "bits", "parameters", "state"]
    headings += ["tokens/s", "seconds", "device", *varied]
    shown = table(headings, rows)
    edge = any(mapping(cell.get("search")).get("at_edge") for cell in cells.values())
    note = tag("p", "* best at the edge of what was searched.", class_="fine") if edge else ""
    return tag("details", tag("summary", f"All {len(cells)} cells"), shown, note)


def versions_part(experiment: Experiment) -> Markup:
    """Everything that made the numbers: versions, machines, commands."""
    found: dict[str, dict[str, None]] = {}
    for source in (experiment.summary, *experiment.cells.values()):
        for key, value in mapping(source.get("made_by")).items():
            found.setdefault(str(key), {})[_flat(value)] = None
    if not found:
        return Markup()
    rows = [tag("div", tag("dt", key), tag("dd", _several(found[key]))) for key in found]
    return tag("details", tag("summary", "Made by"), tag("dl", *rows, class_="settings"))


def command_line(command: str) -> Markup:
    """A command with a button that copies it."""
    copy = tag("button", "copy", class_="copy screen-only", type="button")
    return tag("div", tag("code", command), copy, class_="command")


def _best(condition: Condition, bucket: str) -> str | None:
    scored = {model: condition.score(model, bucket) for model in condition.models}
    means = {model: score.mean for model, score in scored.items() if score is not None}
    if len(means) < 2:
        return None
    choose = min if condition.language else max
    return choose(means, key=lambda model: means[model])


def _score(condition: Condition, score: Interval | None, best: bool) -> Markup:
    if score is None:
        return Markup()
    factor, digits = (1, 3) if condition.language else (100, 1)
    words: list[Any] = [f"{score.mean * factor:.{digits}f}"]
    if score.count > 1:
        words.append(tag("small", f" ± {score.half * factor:.{digits}f}"))
    return tag("b", *words) if best else join(words)


def _settings(cell: Json) -> dict[str, str]:
    """Task, model and training settings of a cell on one level, as text."""
    flat = {}
    for part in ("scale", "task", "model", "training"):
        value = cell.get(part)
        if isinstance(value, dict):
            for key, item in value.items():
                flat[f"{part}.{key}"] = "none" if item is None else _flat(item)
        elif value is not None:
            flat[part] = _flat(value)
    return flat


def _rate(cell: Json) -> str:
    search = mapping(cell.get("search"))
    rate = search.get("best", mapping(cell.get("training")).get("learning_rate"))
    return "" if rate is None else f"{number(rate)}{'*' if search.get('at_edge') else ''}"


def _one(cells: list[Json], key: str) -> Any:
    return next((cell[key] for cell in cells if cell.get(key) is not None), None)


def _flat(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else number(value)


def _several(values: dict[str, None]) -> str:
    shown = list(values)[:6]
    more = len(values) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more > 0 else "")


def _data_uri(picture: Path, experiment: Experiment) -> str | None:
    try:
        content = picture.read_bytes()
    except OSError as problem:
        experiment.problems.append(f"{experiment.name}/{picture.name}: {problem}")
        return None
    if len(content) > LARGEST_PICTURE:
        size = f"{len(content) / 1e6:.0f} MB"
        experiment.problems.append(f"{experiment.name}/{picture.name} is left out: {size}")
        return None
    return f"data:{PICTURES[picture.suffix]};base64,{base64.b64encode(content).decode()}"
