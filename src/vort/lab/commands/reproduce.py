"""`vort reproduce`: the paper's experiments, redone; tables on the terminal, a report on disk."""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from vort.lab.commands import (
    books_of,
    read_minutes,
    read_names,
    read_settings,
    read_size,
    read_workers,
    say,
)
from vort.lab.processes import begin_loading, processes

if TYPE_CHECKING:
    from vort.lab.experiments.cell import Cell, RunFolder, Size
    from vort.lab.experiments.experiment import Experiment, Figure, Summary
    from vort.lab.experiments.run import Pace

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
        str | None, typer.Option(help="Run only cells whose name fits, e.g. '*-vort-*,*-seed0'.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Another setting of the cells, e.g. training.learning_rate=1e-3, "
            "model.num_scales=4 or task.length=500; they become rows of their own.",
        ),
    ] = None,
    reason: Annotated[
        str, typer.Option(help="Why results that are there are replaced; goes to their history.")
    ] = "",
    minutes: Annotated[
        float | None, typer.Option(help="Begin no cell that would not be over by then.")
    ] = None,
    collect: Annotated[
        Path | None,
        typer.Option(help="Take the cells of another run's folder to OUT, instead of doing any."),
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
    interruption, and only what is missing is done. A result that is replaced moves to history/
    beside cells/; one under version control is replaced with a --reason only.
    """
    if not 0 < share <= 1:
        raise typer.BadParameter(f"--share must lie in (0, 1], got {share}")
    if not resume and (collect is not None or not run):
        option = "--no-run" if collect is None else "--collect"
        raise typer.BadParameter(f"--restart does cells again, and {option} does none")
    if run and collect is None and workers != 1 and only is None:
        begin_loading()  # what this process is about to load as well
    from vort.lab.experiments import EXPERIMENTS
    from vort.lab.experiments.cell import RunFolder

    size, side_by_side, limit = read_size(scale), read_workers(workers), read_minutes(minutes)
    asked = [EXPERIMENTS[name] for name in read_names(only, "--only", EXPERIMENTS)]
    # Where nothing is to be done, no text is read: what is there is summarised without.
    texts = books_of(data) if run and collect is None else Path("books")
    plan = Plan(size, texts, share)
    experiments, todo = plan.choose(asked, cells, read_settings(changes, "--set"))
    folder = RunFolder(Path("reports") / size if out is None else out, reason.strip())
    if collect is not None:
        _collect(collect, folder, size)
    todo = todo if run and collect is None else []
    missing = [cell for cell in todo if not (resume and folder.finished(cell))]
    if len(missing) < len(todo):
        console.print(f"{len(todo) - len(missing)} of {len(todo)} cells are done already")
    _refuse_silent_loss(folder, [folder.cell(cell) for cell in missing])

    failed = _run(missing, folder, side_by_side, limit)
    if only is None and (collect is not None or not run):
        experiments = [each for each in experiments if plan.kept(each, folder)]
    # Processes that start at once are there where cells were done side by side.
    with Pictures.drawn(plan, folder, side_by_side if missing else 1) as pictures:
        shown = [_summarise(experiment, plan, folder, pictures) for experiment in experiments]
        if any(shown) and only is None:
            _draw_paper_figures(folder, pictures)
    if any(shown):
        _write_page(folder)
    if failed:
        console.print(f"[red]{failed} cells failed[/red]; the same command tries them again")
        raise typer.Exit(1)
    if not any(shown):
        raise typer.BadParameter(f"{folder.root} has no results to show, and none were to be made")


@dataclass(frozen=True)
class Plan:
    """How large experiments are: their size, the folder of texts if any, the share of training."""

    size: "Size"
    data: Path | None
    share: float

    def kept(self, experiment: "Experiment", folder: "RunFolder") -> bool:
        """Whether a folder has something of an experiment, or of those it is made from."""
        if folder.part(experiment.name).exists():
            return True
        return not experiment.direct and not experiment.cells(self.size, self.data)

    def choose(
        self, asked: "Sequence[Experiment]", pattern: str | None, changes: Mapping[str, Any]
    ) -> "tuple[list[Experiment], list[Cell]]":
        """The experiments to summarise and the cells to do.

        All that is asked for, or the cells whose name fits, or these with other settings, and the
        experiments that show them. Cells that lack a setting are left out; none at all is an error.
        """
        found = [(e, cell) for e in asked for cell in e.cells(self.size, self.data)]
        if pattern is None and not changes:
            return list(asked), [cell.shortened(self.share) for _, cell in found]
        # Names are those of whole cells, whatever their share is.
        parts = ["*"] if pattern is None else [part.strip() for part in pattern.split(",")]
        fits = [(e, c) for e, c in found if any(fnmatch(c.id, part) for part in parts)]
        if not fits:
            option = "--set" if pattern is None else f"--cells {pattern}"
            names, ids = ", ".join(e.name for e in asked), [cell.id for _, cell in found]
            shown = ", ".join([*ids[:6], *(["..."] if len(ids) > 6 else [])]) or "no cells"
            raise typer.BadParameter(f"{option} fits no cell of {names}; there are {shown}")
        todo: list[Cell] = []
        problems: dict[str, str] = {}
        for experiment, cell in fits:
            short = cell.shortened(self.share)
            try:
                todo.append(experiment.changed(short, changes) if changes else short)
            except TypeError as problem:
                problems.setdefault(experiment.name, str(problem))
        if not todo:
            raise typer.BadParameter("; ".join(problems.values()))
        for name, words in problems.items():
            say(console, f"{name}: left out, {words}")
        touched = {cell.experiment for cell in todo}
        return [e for e in asked if touched & {e.name, *e.uses}], todo


def _refuse_silent_loss(folder: "RunFolder", replaced: Sequence[Path]) -> None:
    """Refuse to replace results under version control without a word on why."""
    from vort.lab.report.provenance import under_version_control

    lost = [] if folder.reason else under_version_control(folder.root, replaced)
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise typer.BadParameter(
            f"--reason must say why committed results are replaced: {lost[0].stem}{more}"
        )


def _collect(source: Path, folder: "RunFolder", size: "Size") -> None:
    if not any(source.glob(f"*/cells/*-{size}-*.json")):
        raise typer.BadParameter(
            f"--collect must be a folder that vort reproduce --scale {size} wrote, got {source}"
        )
    _refuse_silent_loss(folder, folder.replaces(source))
    taken = folder.collect(source)
    say(console, f"{len(taken)} cells taken from {source}")


def _run(cells: "list[Cell]", folder: "RunFolder", workers: int, limit: float | None) -> int:
    """Do cells, with a bar; how many failed."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    from vort.lab.experiments.run import run_cells

    if not cells:
        return 0
    failed, pace, left, began = 0, _pace_of(cells, folder), 0, perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Elapsed())
    with Progress(*columns, console=console) as bar:
        row = bar.add_task("cells", total=len(cells))

        def started(cell: "Cell") -> None:
            bar.update(row, description=cell.id)

        def fits(cell: "Cell") -> bool:
            nonlocal left
            room = limit is None or perf_counter() - began + pace.seconds(cell) <= limit
            left += not room
            return room

        done = run_cells(cells, folder, workers=workers, restart=True, started=started, fits=fits)
        try:
            for count, outcome in enumerate(done, 1):
                bar.advance(row)
                if not console.is_terminal:  # where a bar is shown at its end alone
                    spent = perf_counter() - began
                    say(console, f"{count} of {len(cells)} cells, {spent:.0f} s: {outcome.cell.id}")
                if outcome.error:
                    failed += 1
                    say(bar.console, ("failed", "red"), f" {outcome.cell.id}: {outcome.error}")
                else:
                    pace.learn(folder.read(outcome.cell) or {})
        except KeyboardInterrupt:
            console.print("stopped; the same command goes on from here")
            raise typer.Exit(130) from None
    if left:
        console.print(f"{left} cells were not begun for want of time; the same command goes on")
    return failed


def _pace_of(cells: "Sequence[Cell]", folder: "RunFolder") -> "Pace":
    """What is known of how long cells take: from those that are there, or were once."""
    from vort.lab.experiments.run import Pace
    from vort.lab.report.folder import read_cells

    pace = Pace()
    for name in {cell.experiment for cell in cells}:
        for record in read_cells(folder.part(name), []).values():
            pace.learn(record)
    return pace


class Pictures:
    """Draws what a run shows; with a pool, in other processes while the rest goes on.

    What draws a picture is known by name there: functions do not travel.
    """

    def __init__(self, plan: Plan, folder: "RunFolder", pool: Executor | None) -> None:
        self.plan, self.folder, self.pool = plan, folder, pool
        self._begun: list[Future[None]] = []

    @classmethod
    @contextmanager
    def drawn(cls, plan: Plan, folder: "RunFolder", workers: int) -> "Iterator[Pictures]":
        """All of them are there when the block ends."""
        context, quick = processes()
        if workers == 1 or not quick:
            yield cls(plan, folder, None)
            return
        with ProcessPoolExecutor(workers, context, _one_thread) as pool:
            pictures = cls(plan, folder, pool)
            yield pictures
            with _busy("drawing"):
                for future in pictures._begun:
                    future.result()

    def of_experiment(self, experiment: "Experiment", figure: "Figure") -> None:
        """A picture of a summary, into its part of the folder."""
        if self.pool is None:
            figure.draw(self.folder.part(experiment.name) / figure.file)
        else:
            given = (experiment.name, figure.file, self.plan, self.folder)
            self._begun.append(self.pool.submit(_draw_of_experiment, *given))

    def of_paper(self, name: str, path: Path) -> None:
        """One of the paper's figures."""
        from vort.lab.commands.figures import draw_paper_figure

        if self.pool is None:
            draw_paper_figure(name, self.folder.root, path)
        else:
            given = (name, self.folder.root, path)
            self._begun.append(self.pool.submit(draw_paper_figure, *given))


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _draw_of_experiment(name: str, file: str, plan: Plan, folder: "RunFolder") -> None:
    figures = _figures_of(name, plan, folder)
    next(figure for figure in figures if figure.file == file).draw(folder.part(name) / file)


@cache
def _figures_of(name: str, plan: Plan, folder: "RunFolder") -> "Sequence[Figure]":
    from vort.lab.experiments import EXPERIMENTS
    from vort.lab.experiments.summary import summarise

    found = summarise(EXPERIMENTS[name], folder, plan.size, data=plan.data, share=plan.share)
    return found.summary.figures


@contextmanager
def _busy(doing: str) -> "Iterator[None]":
    """What is being done, shown for as long as it takes; in a line where there is no terminal."""
    if console.is_terminal:
        with console.status(doing):
            yield
    else:
        say(console, doing)
        yield


def _summarise(
    experiment: "Experiment", plan: Plan, folder: "RunFolder", pictures: Pictures
) -> bool:
    """Tables and verdicts of all that a folder has of an experiment, shown and written.

    Whether there was anything: of nothing no summary is left.
    """
    from vort.lab.experiments.summary import summarise
    from vort.lab.report.folder import write_summary

    with _busy(f"summarising {experiment.name}"):
        found = summarise(experiment, folder, plan.size, data=plan.data, share=plan.share)
        part = folder.part(experiment.name)
        if found:
            part.mkdir(parents=True, exist_ok=True)
        for figure in found.summary.figures:
            pictures.of_experiment(experiment, figure)
    _show(experiment, found.summary)
    if found:
        write_summary(part, found.to_dict())
    return bool(found)


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


def _draw_paper_figures(folder: "RunFolder", pictures: Pictures) -> None:
    """The paper's figures, as far as the run has what they show."""
    from vort.lab.commands.figures import draw_figures
    from vort.lab.report.figures import PAPER_FIGURES

    names = [figure.name for figure in PAPER_FIGURES]
    draw_figures(folder.root, folder.figures, names, ("png",), pictures.of_paper)


def _write_page(folder: "RunFolder") -> None:
    from vort.lab.experiments import EXPERIMENTS
    from vort.lab.report.run_page import write_report_page

    write_report_page(folder.root, folder.page, EXPERIMENTS)
    say(console, "report: ", (os.path.relpath(folder.page), "bold"))
