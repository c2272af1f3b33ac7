"""`vort report` and `vort figures`: a page and the paper's figures, from a run of our own."""

import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from vort.lab.commands import check_page, read_names, say

if TYPE_CHECKING:
    from vort.lab.report.figures import Need

console = Console()
FORMATS = ("png", "svg")


def report(
    run_dir: Annotated[Path, typer.Argument(help="Folder that `vort reproduce` wrote to.")],
    out: Annotated[
        Path | None, typer.Option(help="Page to write; report.html in the run folder if absent.")
    ] = None,
) -> None:
    """Write one self-contained HTML page: verdicts, tables, curves, figures, commands."""
    from vort.lab.experiments import EXPERIMENTS
    from vort.lab.experiments.cell import RunFolder
    from vort.lab.report.run_page import write_report_page
    from vort.lab.report.standalone import one_line

    target = RunFolder(run_dir).page if out is None else out
    if run_dir.is_dir():
        check_page(target, "--out")
    run = write_report_page(run_dir, target, EXPERIMENTS)
    for problem_text in run.problems:
        say(console, f"left out: {one_line(problem_text)}", style="yellow")
    size = target.stat().st_size / 1e6
    say(console, "report: ", (str(target), "bold"), f" ({size:.1f} MB)")


def figures(
    run_dir: Annotated[Path, typer.Argument(help="Folder that `vort reproduce` wrote to.")] = Path(
        "reports/laptop"
    ),
    out: Annotated[
        Path | None, typer.Option(help="Folder for pictures; figures/ in the run folder if absent.")
    ] = None,
    only: Annotated[str | None, typer.Option(help="Figures to draw, separated by commas.")] = None,
) -> None:
    """Draw the paper's figures as PNG and SVG, with captions that say how each was measured.

    A figure whose measurements the run lacks is left out, with the command that makes them.
    """
    from vort.lab.experiments.cell import RunFolder
    from vort.lab.report.figures import PAPER_FIGURES

    if not run_dir.is_dir():
        raise typer.BadParameter(
            f"RUN_DIR must be a folder that vort reproduce wrote, got {run_dir}"
        )
    wanted = read_names(only, "--only", [figure.name for figure in PAPER_FIGURES])
    target = RunFolder(run_dir).figures if out is None else out
    if not draw_figures(run_dir, target, wanted):
        raise typer.Exit(2)
    say(console, "figures: ", (os.path.relpath(target), "bold"), ", captions.md beside them")


def draw_paper_figure(name: str, run_dir: Path, path: Path) -> None:
    """Draw one of the paper's figures that a run has the measurements for."""
    from vort.lab.report.figures import PAPER_FIGURES, read_records

    figure = next(figure for figure in PAPER_FIGURES if figure.name == name)
    figure.draw(path, read_records(run_dir, (*figure.needs, *figure.any_of)))


def draw_figures(
    run_dir: Path,
    target: Path,
    wanted: Sequence[str],
    formats: Sequence[str] = FORMATS,
    draw: Callable[[str, Path], None] | None = None,
) -> int:
    """Draw what a run has the measurements for, and leave a page of it for `vort report`.

    Returns how many were drawn. Beside the pictures: captions.md, captions.json, and summary.json,
    which the page reads.

    draw: does so for a name and a path, in its own time; here and now if absent.
    """
    from vort.lab.report.figures import (
        PAPER_FIGURES,
        caption_of,
        read_records,
        write_captions,
    )
    from vort.lab.report.folder import write_summary

    captions = []
    for figure in PAPER_FIGURES:
        name = figure.name
        if name not in wanted:
            continue
        found = read_records(run_dir, (*figure.needs, *figure.any_of))
        missing = figure.missing(found)
        if missing:
            _explain(name, missing, run_dir)
            continue
        target.mkdir(parents=True, exist_ok=True)
        files = [f"{name}.{suffix}" for suffix in formats]
        with console.status(f"drawing {name}"):
            for file in files:
                if draw is None:
                    figure.draw(target / file, found)
                else:
                    draw(name, target / file)
        captions.append(caption_of(figure, found, files))
        console.print(f"{name}: {' and '.join(files)}", highlight=False)
    if not captions:
        return 0
    write_captions(target, captions)
    record = {
        "title": "The paper's figures",
        "about": "Every figure of the paper for which this run has the measurements.",
        "command": "vort figures",
        "sheets": [],
        "verdicts": [],
        "figures": [
            {"file": c["files"][0], "caption": c["caption"], "command": "vort figures"}
            for c in captions
        ],
        "notes": [],
    }
    write_summary(target, record)
    return len(captions)


def _explain(name: str, missing: "Sequence[Need]", run_dir: Path) -> None:
    """What a figure lacks, and what to type."""
    parts = ",".join(dict.fromkeys(need.experiment for need in missing))
    lacking = ", ".join(map(str, missing))
    options = f"--scale laptop --only {parts} --cells '*-vort-*seed0'"
    command = f"vort reproduce {options} --out {shlex.quote(str(run_dir))}"
    say(
        console,
        f"{name}: left out, {run_dir} lacks {lacking}; make it with\n  {command}",
        style="yellow",
    )
