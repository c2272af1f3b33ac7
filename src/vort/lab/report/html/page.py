"""The whole report page."""

from collections import Counter
from pathlib import Path

from vort.lab.report.html.charts import Charts
from vort.lab.report.html.markup import Markup, join, tag
from vort.lab.report.html.run_directory import Experiment, Run, mapping, read_run
from vort.lab.report.html.scores import conditions_of
from vort.lab.report.html.sections import (
    VERDICTS,
    cells_part,
    command_line,
    figures_part,
    notes_part,
    scores_part,
    settings_part,
    sheets_part,
    verdict_chip,
    verdict_counts,
    verdicts_part,
    versions_part,
)
from vort.lab.report.standalone import standalone_page

__all__ = ["report_page", "write_report_page"]


def write_report_page(run_directory: Path, out: Path) -> Run:
    """Write the page of a run directory to a file, and return what was read."""
    run = read_run(run_directory)
    page = report_page(run)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    return run


def report_page(run: Run) -> str:
    """The page as text: summary, then a section for each experiment.

    Nothing in it comes from outside, and nothing in the run directory can act in it.
    """
    charts = Charts()
    sections = [_section(experiment, charts) for experiment in run.experiments]
    title = f"VORT report: {run.folder.resolve().name}"
    links = [
        tag("li", tag("a", experiment.title, href=f"#{_anchor(index)}"))
        for index, experiment in enumerate(run.experiments)
    ]
    numbered = [
        tag("section", body, id=_anchor(index), class_="experiment")
        for index, body in enumerate(sections)
    ]
    contents = tag("nav", tag("ol", *links), aria_label="Contents", class_="contents")
    main = tag("main", _summary(run), *numbered)
    top = tag("header", tag("h1", title), _subtitle(run), class_="top")
    tip = tag("div", class_="tip", id="tip", aria_hidden="true")
    return standalone_page(
        title,
        join([top, tag("div", contents, main, class_="page"), tip]),
        styles=["base.css", "report.css"],
        scripts=["report_charts.js", "report.js"],
        data={"charts": charts.specs},
    )


def _section(experiment: Experiment, charts: Charts) -> Markup:
    summary = experiment.summary
    conditions = conditions_of(experiment)
    about = [tag("p", summary["about"], class_="about")] if summary.get("about") else []
    command = [command_line(str(summary["command"]))] if summary.get("command") else []
    # Figures first to be made: a picture that cannot be read is named in the notes.
    figures = figures_part(experiment)
    sheets = sheets_part(experiment)
    return join(
        [
            tag("h2", experiment.title),
            *about,
            *command,
            notes_part(experiment),
            verdicts_part(experiment),
            sheets,
            scores_part(conditions, aside=bool(sheets)),
            charts.of_conditions(conditions, mapping(experiment.summary.get("labels"))),
            figures,
            tag(
                "div",
                settings_part(experiment),
                cells_part(experiment),
                versions_part(experiment),
                class_="more",
            ),
        ]
    )


def _summary(run: Run) -> Markup:
    rows = []
    for index, experiment in enumerate(run.experiments):
        counts = verdict_counts(experiment)
        chips = [verdict_chip(name, count) for name, count in _sorted(counts)]
        cells = len(experiment.cells)
        chips += (
            [tag("span", "1 cell" if cells == 1 else f"{cells} cells", class_="chip plain")]
            if cells
            else []
        )
        bad = len(experiment.problems)
        unread = f"{bad} file{'s' if bad > 1 else ''} unread"
        chips += [tag("span", unread, class_="chip bad")] if bad else []
        name = tag("a", experiment.title, href=f"#{_anchor(index)}")
        rows.append(tag("li", name, tag("span", *chips, class_="chips")))
    return tag(
        "section",
        tag("h2", "Summary"),
        _bar(sum((verdict_counts(e) for e in run.experiments), Counter[str]())),
        tag("ul", *rows, class_="summary"),
        id="summary",
    )


def _bar(counts: Counter[str]) -> Markup:
    """All verdicts as big figures."""
    return tag(
        "div",
        *(
            tag(
                "div",
                tag("b", count),
                tag("span", name or "without a verdict"),
                class_=f"tally {VERDICTS.get(name, 'other')}",
            )
            for name, count in _sorted(counts)
        ),
        class_="tallies",
    )


def _subtitle(run: Run) -> Markup:
    cells = sum(len(experiment.cells) for experiment in run.experiments)
    claims = sum(verdict_counts(experiment).total() for experiment in run.experiments)
    parts = [
        f"{len(run.experiments)} experiments" if len(run.experiments) != 1 else "1 experiment",
        f"{claims} claims of the paper" if claims else "",
        f"{cells} trained cells" if cells else "",
    ]
    return tag("p", ", ".join(filter(None, parts)))


def _sorted(counts: Counter[str]) -> list[tuple[str, int]]:
    order = {name: place for place, name in enumerate(VERDICTS)}
    return sorted(counts.items(), key=lambda item: (order.get(item[0], len(order)), item[0]))


def _anchor(index: int) -> str:
    return f"part-{index + 1}"
