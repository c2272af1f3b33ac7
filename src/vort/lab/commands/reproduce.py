"""`vort reproduce`: the paper's experiments, redone; tables on the terminal, a report on disk."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from vort.lab.commands import books_of, read_names, read_settings, read_size, read_workers

if TYPE_CHECKING:
    from vort.lab.experiments.cell import Cell, RunFolder, Size
    from vort.lab.experiments.experiment import Experiment, Summary

console = Console()


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
        str | None, typer.Option(help="Run only cells whose name fits, e.g. '*beta1.0-seed0'.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Another setting of the cells, e.g. training.learning_rate=1e-3, "
            "model.num_scales=4 or task.length=500; they become rows of their own.",
        ),
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
    from vort.lab.experiments import EXPERIMENTS
    from vort.lab.experiments.cell import RunFolder

    if not 0 < share <= 1:
        raise typer.BadParameter(f"--share must lie in (0, 1], got {share}")
    size, side_by_side = read_size(scale), read_workers(workers)
    names = read_names(only, "--only", EXPERIMENTS)
    plan = Plan(size, names, books_of(data), share)
    plan.choose(cells, read_settings(changes, "--set"))
    folder = RunFolder(Path("reports") / size if out is None else out)

    failed = _run(plan.todo if run else [], folder, side_by_side, resume)
    for experiment in plan.experiments:
        _summarise(experiment, plan, folder)
    if only is None:
        _draw_paper_figures(folder)
    _write_page(folder)
    if failed:
        console.print(f"[red]{failed} cells failed[/red]; the same command tries them again")
        raise typer.Exit(1)


@dataclass
class Plan:
    """Which experiments are summarised, and which of their cells are done.

    Attributes:
        size: "laptop" or "paper".
        names: of the experiments asked for.
        data: folder of texts, or None.
        share: of each cell's training.
        todo: the cells chosen.
        whole: whether all of them are.
    """

    size: "Size"
    names: Sequence[str]
    data: Path | None
    share: float
    todo: "list[Cell]" = field(default_factory=list)
    whole: bool = True

    @property
    def experiments(self) -> "list[Experiment]":
        """What is asked for and has a part in what is done, in order."""
        from vort.lab.experiments import EXPERIMENTS

        touched = {cell.experiment for cell in self.todo}
        asked = [EXPERIMENTS[name] for name in self.names]
        return [e for e in asked if self.whole or touched & {e.name, *e.uses}]

    def cells(self, experiment: "Experiment") -> "list[Cell]":
        """Its cells, as long as they are to be."""
        found = experiment.cells(self.size, self.data)
        return [cell.shortened(self.share) for cell in found]

    def choose(self, pattern: str | None, changes: Mapping[str, Any]) -> None:
        """Take all cells, or those whose name fits, or these with other settings.

        Those that lack a setting are left out, and none at all is an error.
        """
        from vort.lab.experiments import EXPERIMENTS

        self.whole = pattern is None and not changes
        asked = [EXPERIMENTS[name] for name in self.names]
        found = [(e, cell) for e in asked for cell in e.cells(self.size, self.data)]
        # Names are those of whole cells, whatever their share is.
        fits = [
            (e, cell.shortened(self.share))
            for e, cell in found
            if pattern is None or fnmatch(cell.id, pattern)
        ]
        if not self.whole and not fits:
            ids = [cell.id for _, cell in found]
            shown = f"{', '.join(ids[:6])}{' ...' if len(ids) > 6 else ''}" if ids else "no cells"
            asked_for = "--set" if pattern is None else f"--cells {pattern}"
            raise typer.BadParameter(
                f"{asked_for} fits no cell of {', '.join(self.names)}; there are {shown}"
            )
        if not changes:
            self.todo = [cell for _, cell in fits]
            return
        problems: dict[str, str] = {}
        for experiment, cell in fits:
            try:
                self.todo.append(experiment.changed(cell, changes))
            except TypeError as problem:
                problems.setdefault(experiment.name, str(problem))
        if not self.todo:
            raise typer.BadParameter("; ".join(problems.values()))
        for name, problem_text in problems.items():
            console.print(f"{name}: left out, {escape(problem_text)}")


def _run(cells: "list[Cell]", folder: "RunFolder", workers: int, resume: bool) -> int:
    """Do what is missing, with a bar; how many cells failed."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    from vort.lab.experiments.run import run_cells

    missing = [cell for cell in cells if not (resume and folder.finished(cell))]
    if len(missing) < len(cells):
        console.print(f"{len(cells) - len(missing)} of {len(cells)} cells are done already")
    if not missing:
        return 0
    failed = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Elapsed())
    with Progress(*columns, console=console) as bar:
        row = bar.add_task("cells", total=len(missing))

        def started(cell: "Cell") -> None:
            bar.update(row, description=cell.id)

        done = run_cells(missing, folder, workers=workers, restart=not resume, started=started)
        try:
            for outcome in done:
                bar.advance(row)
                if outcome.error:
                    failed += 1
                    message = escape(f"{outcome.cell.id}: {outcome.error}")
                    bar.console.print(f"[red]failed[/red] {message}")
        except KeyboardInterrupt:
            console.print("stopped; the same command goes on from here")
            raise typer.Exit(130) from None
    return failed


def _summarise(experiment: "Experiment", plan: Plan, folder: "RunFolder") -> None:
    """Tables and verdicts of all that a folder has of an experiment, shown and written."""
    from vort.lab.experiments import EXPERIMENTS
    from vort.lab.report.folder import write_summary

    records = []
    for source in (experiment, *(EXPERIMENTS[name] for name in experiment.uses)):
        found = (folder.read(cell) for cell in plan.cells(source))
        records += [record for record in found if record is not None]
    for name in (experiment.name, *experiment.uses):
        records += folder.changed(name, plan.size, plan.share)
    with console.status(f"summarising {experiment.name}"):
        summary = experiment.summarise(records, plan.size)
        part = folder.part(experiment.name)
        part.mkdir(parents=True, exist_ok=True)
        for figure in summary.figures:
            figure.draw(part / figure.file)
    _show(experiment, summary)
    made_by = [record["made_by"] for record in records]
    command = f"vort reproduce --scale {plan.size} --only "
    command += ",".join((*experiment.uses, experiment.name))
    command += "" if plan.share == 1 else f" --share {plan.share:g}"
    record = {
        "title": experiment.title,
        "about": experiment.about,
        "scale": plan.size,
        "trained_on": sorted({f"{made['device']}, torch {made['torch']}" for made in made_by}),
        "command": command,
        **summary.to_dict(command),
    }
    write_summary(part, record)


def _show(experiment: "Experiment", summary: "Summary") -> None:
    from vort.lab.experiments.experiment import claims_sheet

    if not summary.sheets and summary.notes:
        console.print(f"{experiment.name}:")
    for sheet in summary.sheets:
        console.print(sheet.to_rich())
    if summary.verdicts:
        console.print(claims_sheet(summary.verdicts).to_rich())
    for note in summary.notes:
        console.print(f"  {escape(note)}")


def _draw_paper_figures(folder: "RunFolder") -> None:
    """The paper's figures, as far as the run has what they show."""
    from vort.lab.commands.figures import draw_figures
    from vort.lab.report.figures import PAPER_FIGURES

    names = [figure.name for figure in PAPER_FIGURES]
    draw_figures(folder.root, folder.figures, names, ("png",))


def _write_page(folder: "RunFolder") -> None:
    from vort.lab.report.run_page import write_report_page

    write_report_page(folder.root, folder.page)
    console.print(f"report: [bold]{os.path.relpath(folder.page)}[/bold]")
