"""`vort figures`: the paper's figures, drawn from a run of our own."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from vort.lab.report.figures import Need

console = Console()
FORMATS = ("png", "svg")


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
    from vort.lab.report.figures import PAPER_FIGURES

    names = [figure.name for figure in PAPER_FIGURES]
    wanted = names if only is None else [name.strip() for name in only.split(",")]
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise typer.BadParameter(f"--only takes {', '.join(names)}, got {', '.join(unknown)}")
    target = run_dir / "figures" if out is None else out
    draw_figures(run_dir, target, wanted)
    console.print(f"figures: [bold]{os.path.relpath(target)}[/bold], captions.md beside them")


def draw_figures(
    run_dir: Path, target: Path, wanted: Sequence[str], formats: Sequence[str] = FORMATS
) -> None:
    """Draw what a run has the measurements for, and leave pages of it all for `vort report`.

    Beside the pictures: captions.md, captions.json, and summary.json, which the page reads.
    """
    from vort.lab.report.figures import (
        PAPER_FIGURES,
        caption_of,
        read_records,
        write_captions,
    )
    from vort.lab.report.folder import write_summary

    target.mkdir(parents=True, exist_ok=True)
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
        files = [f"{name}.{suffix}" for suffix in formats]
        with console.status(f"drawing {name}"):
            for file in files:
                figure.draw(target / file, found)
        captions.append(caption_of(figure, found, files))
        console.print(f"{name}: {' and '.join(files)}", highlight=False)
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


def _explain(name: str, missing: "Sequence[Need]", run_dir: Path) -> None:
    """What a figure lacks, and what to type."""
    parts = ",".join(dict.fromkeys(need.experiment for need in missing))
    lacking = ", ".join(map(str, missing))
    options = f"--scale laptop --only {parts} --cells '*-vort-*seed0'"
    command = f"vort reproduce {options} --out {shlex.quote(str(run_dir))}"
    console.print(
        f"{name}: left out, {run_dir} lacks {lacking}; make it with\n  {command}",
        style="yellow",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
