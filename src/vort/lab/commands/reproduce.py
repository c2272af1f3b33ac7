"""`vort reproduce`: the paper's experiments, redone; tables on the terminal, a report on disk."""

import os
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from vort.lab.experiments.cell import Cell
    from vort.lab.experiments.experiment import Experiment

console = Console()
PARTS = (
    "kernel",
    "pilot",
    "label_copy",
    "books",
    "ablations",
    "complexity",
    "orders",
    "plasticity",
)


def reproduce(
    scale: Annotated[str, typer.Option(help="laptop (minutes, any machine) or paper (a GPU).")] = (
        "laptop"
    ),
    only: Annotated[str | None, typer.Option(help="Parts to run, separated by commas.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results and report; reports/SCALE by default.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--restart", help="Keep finished cells, or do them again.")
    ] = True,
    workers: Annotated[
        int | None, typer.Option(help="Cells side by side; one for each core by default.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(envvar="VORT_DATA", help="Folder with books/, for --scale paper.")
    ] = None,
    cells: Annotated[
        str | None, typer.Option(help="Only cells whose name fits, e.g. '*beta1.0-seed0'.")
    ] = None,
    run: Annotated[
        bool, typer.Option("--run/--no-run", help="Do missing cells, or summarise what is there.")
    ] = True,
    share: Annotated[
        float, typer.Option(help="Share of each cell's training steps; kept apart from full runs.")
    ] = 1.0,
) -> None:
    """Redo the paper's experiments; ends with tables, verdicts and a report folder.

    Every finished cell (task, model, seed) is kept: run the same command again after an
    interruption, and only what is missing is done.
    """
    from vort.lab.experiments.cell import SCALES

    if scale not in SCALES:
        raise typer.BadParameter(f"--scale takes {' or '.join(SCALES)}, got {scale}")
    wanted = list(PARTS) if only is None else [name.strip() for name in only.split(",")]
    unknown = [name for name in wanted if name not in PARTS]
    if unknown:
        raise typer.BadParameter(f"--only takes {', '.join(PARTS)}, got {', '.join(unknown)}")
    if not 0 < share <= 1:
        raise typer.BadParameter(f"--share must lie in (0, 1], got {share}")
    out = Path("reports") / scale if out is None else out
    texts = books_of(data)
    planned = _plan(wanted, scale, texts, cells, share)
    if "kernel" in wanted:
        _kernel(out / "kernel")
    todo = [cell for name in wanted for cell in planned.get(name, [])]
    failed = _run(todo if run else [], out, workers, resume)
    for name in wanted:
        if name != "kernel":
            _report(name, planned, out, scale, share)
    if only is None:
        _figures(out)
    _finish(out, failed)


def books_of(data: Path | None) -> Path | None:
    """The folder of texts within the folder a user named."""
    if data is None:
        return None
    if not data.is_dir():
        raise typer.BadParameter(f"--data must be a folder, got {data}")
    return data / "books" if (data / "books").is_dir() else data


def _plan(
    wanted: list[str], scale: Any, texts: Path | None, pattern: str | None, share: float
) -> dict[str, list["Cell"]]:
    """The cells of every part, those of parts that others are summarised from included."""
    from dataclasses import replace

    from vort.lab.experiments.registry import EXPERIMENTS

    found = {}
    trained = [name for name in wanted if name != "kernel"]
    used = [name for part in trained for name in EXPERIMENTS[part].uses]
    for name in dict.fromkeys((*trained, *used)):
        cells = EXPERIMENTS[name].cells(scale, texts)
        if share < 1:
            cells = [replace(cell, training=_shortened(cell.training, share)) for cell in cells]
        found[name] = [c for c in cells if pattern is None or fnmatch(c.id, pattern)]
        if name in wanted and name == "books" and scale == "paper" and texts is None:
            console.print("books: skipped, --scale paper needs --data, a folder with books/")
    return found


def _shortened(training: Any, share: float) -> dict[str, Any]:
    """Training settings with fewer steps or epochs."""
    shorter = dict(training)
    for key in ("steps", "epochs"):
        if key in shorter:
            shorter[key] = max(1, round(shorter[key] * share))
    return shorter


def _run(cells: list["Cell"], out: Path, workers: int | None, resume: bool) -> list[str]:
    """Do what is missing, with a bar; the messages of cells that failed."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    from vort.lab.experiments.cell import finished
    from vort.lab.experiments.runner import default_workers, run_cells

    missing = [cell for cell in cells if not (resume and finished(cell, out))]
    if len(missing) < len(cells):
        console.print(f"{len(cells) - len(missing)} of {len(cells)} cells are done already")
    if not missing:
        return []
    failed = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Elapsed())
    side_by_side = default_workers() if workers is None else workers
    with Progress(*columns, console=console) as bar:
        row = bar.add_task("cells", total=len(missing))
        names: list[str] = []

        def started(cell: "Cell") -> None:
            names.append(cell.id)
            bar.update(row, description=names[-1])

        done = run_cells(missing, out, workers=side_by_side, restart=not resume, started=started)
        try:
            for outcome in done:
                bar.advance(row)
                if outcome.error:
                    failed.append(f"{outcome.cell.id}: {outcome.error}")
                    bar.console.print(f"[red]failed[/red] {escape(failed[-1])}")
        except KeyboardInterrupt:
            console.print("stopped; the same command goes on from here")
            raise typer.Exit(130) from None
    return failed


def _report(
    name: str, planned: dict[str, list["Cell"]], out: Path, scale: Any, share: float
) -> None:
    """Tables and verdicts of a part, on the terminal and in its folder."""
    from vort.lab.experiments.cell import read_cell
    from vort.lab.experiments.claims import claims_sheet
    from vort.lab.experiments.registry import EXPERIMENTS
    from vort.lab.report.folder import write_summary

    experiment: Experiment = EXPERIMENTS[name]
    members = [cell for part in (name, *experiment.uses) for cell in planned.get(part, [])]
    records = [record for cell in members if (record := read_cell(cell, out)) is not None]
    summary = experiment.summarise(records, scale)
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    for figure in summary.figures:
        figure.draw(folder / figure.file)
    sheets = list(summary.sheets)
    if summary.verdicts:
        sheets.append(claims_sheet(summary.verdicts, "Claims"))
    for sheet in sheets:
        console.print(sheet.to_rich())
    for note in summary.notes:
        console.print(f"  {escape(note)}")
    command = f"vort reproduce --scale {scale} --only {','.join((*experiment.uses, name))}"
    command += "" if share == 1 else f" --share {share:g}"
    record = {
        "title": experiment.title,
        "about": experiment.about,
        "scale": scale,
        "trained_on": sorted({_machine(record["made_by"]) for record in records}),
        "command": command,
        **summary.to_dict(command),
    }
    write_summary(folder, record)


def _machine(made_by: dict[str, str]) -> str:
    return f"{made_by['device']}, torch {made_by['torch']}"


def _figures(out: Path) -> None:
    """The paper's figures, as far as the run has what they show."""
    from vort.lab.commands.figures import draw_figures
    from vort.lab.report.figures import PAPER_FIGURES

    draw_figures(out, out / "figures", [figure.name for figure in PAPER_FIGURES], ("png",))


def _finish(out: Path, failed: list[str]) -> None:
    """Where the report is, and what is missing from it."""
    from vort.lab.report.run_page import write_report_page

    page = out / "report.html"
    write_report_page(out, page)
    console.print(f"report: [bold]{os.path.relpath(page)}[/bold]")
    if failed:
        console.print(f"[red]{len(failed)} cells failed[/red]; the same command tries them again")
        raise typer.Exit(1)


def _kernel(folder: Path) -> None:
    """The claims about kernels, which need no training."""
    from dataclasses import asdict

    from rich.progress import track

    from vort.fractional import PowerLawBasis
    from vort.lab.experiments.claims import claims_sheet
    from vort.lab.experiments.kernel import (
        CLAIMS,
        PAPER_HORIZON,
        PAPER_TOLERANCE,
        compare_rules,
        rules_sheet,
    )
    from vort.lab.report.figures.kernels import draw_kernels_soe, draw_power_law
    from vort.lab.report.folder import write_summary

    folder.mkdir(parents=True, exist_ok=True)
    claims = [check() for check in track(CLAIMS, "kernel claims", console=console)]
    basis = PowerLawBasis.fit(PAPER_HORIZON, 8)
    comparison = compare_rules(PAPER_HORIZON, PAPER_TOLERANCE, basis)
    rules = list(track(comparison, "quadratures", total=5, console=console))
    draw_power_law(folder / "power_law.png", PowerLawBasis.fit(10_000, 12))
    draw_kernels_soe(folder / "kernels_soe.png", PAPER_HORIZON, basis)
    title = "The paper's kernel claims"
    sheets = [rules_sheet(rules, PAPER_HORIZON)]
    for sheet in (*sheets, claims_sheet(claims, title)):
        console.print(sheet.to_rich())
    command = "vort reproduce --only kernel"
    captions = {
        "power_law.png": "Power-law kernels against exponentials, and the shared rates behind one.",
        "kernels_soe.png": "Figure kernels-soe, measured: kernels, convergence, relative error.",
    }
    record = {
        "title": title,
        "about": "The kernel, its quadratures and the theorems about them, with no training.",
        "command": command,
        "sheets": [asdict(sheet) for sheet in sheets],
        "verdicts": [asdict(claim) for claim in claims],
        "figures": [
            {"file": file, "caption": caption, "command": command}
            for file, caption in captions.items()
        ],
        "notes": [],
        "rules": [asdict(rule) for rule in rules],
    }
    write_summary(folder, record)
