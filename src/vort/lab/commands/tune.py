"""`vort tune`: settings for every row, searched in stages with the same budget for all."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from vort.lab.commands import books_of, read_minutes, read_size, read_workers, say

if TYPE_CHECKING:
    from vort.lab.experiments.cell import Cell, RunFolder
    from vort.lab.experiments.run import Outcome, Pace
    from vort.lab.experiments.search import RowSearch

console = Console()
# Of a run, in stage 1.
DEFAULT_SHARE = 1 / 16


def tune(
    experiment: Annotated[
        str | None, typer.Argument(help="pilot, label_copy, books, ...", show_default=False)
    ] = None,
    scale: Annotated[str, typer.Option(help="laptop or paper.")] = "laptop",
    rows: Annotated[
        str | None, typer.Option(help="Rows to tune, separated by commas; all by default.")
    ] = None,
    share: Annotated[
        float, typer.Option(help="Share of a run in stage 1; stage 2 has a quarter, stage 3 all.")
    ] = DEFAULT_SHARE,
    stages: Annotated[int, typer.Option(help="Stages to do.", min=1, max=3)] = 3,
    rates: Annotated[
        str | None,
        typer.Option(
            help="Learning rates, separated by commas, to try in full; no stage before then."
        ),
    ] = None,
    seeds: Annotated[
        int,
        typer.Option(help="Trials of each setting, a seed each; their mean counts.", min=1),
    ] = 1,
    workers: Annotated[int | None, typer.Option(help="Trials side by side.")] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Begin no trial that would not be over by then.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(envvar="VORT_DATA", help="Folder with books/, for --scale paper.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for trials; finished ones are kept.")] = Path(
        "reports/tuning"
    ),
    collect: Annotated[
        Path | None,
        typer.Option(help="Take up the trials of this folder, instead of doing any."),
    ] = None,
) -> None:
    """Search settings on validation data: many short trials, the best for longer.

    Every row has the same number of trials of the same lengths, on seed 100 (and those after it,
    with --seeds), which no table uses.
    A finished trial is never done again, and the same command goes on after an interruption.
    `--collect DIR` adds what DIR has to trials.jsonl, which tables take their settings from.
    """
    if collect is not None:
        if experiment is not None:
            raise typer.BadParameter(f"--collect takes up all trials: leave out {experiment}")
        _collect(collect)
        return
    from vort.lab.experiments import EXPERIMENTS
    from vort.lab.experiments.cell import RunFolder
    from vort.lab.experiments.search import row_searches
    from vort.names import check_choice

    size, side_by_side, folder = read_size(scale), read_workers(workers), RunFolder(out)
    limit = read_minutes(minutes)
    names = None if rows is None else [name.strip() for name in rows.split(",")]
    in_full = _read_rates(rates)
    if in_full and (stages < 3 or share != DEFAULT_SHARE):
        raise typer.BadParameter("--rates are tried in full: leave out --share and --stages")
    known = [table.name for table in EXPERIMENTS.values() if table.searchable]
    check_choice("experiment", experiment, known)
    table = EXPERIMENTS[str(experiment)]
    searches = row_searches(table, size, names, share, books_of(data), in_full, seeds)
    if not searches:
        nothing = " ".join(table.summarise([], size).notes)
        raise typer.BadParameter(f"{experiment} has no cells to tune at --scale {size}. {nothing}")
    search = Search(searches, folder, stages, limit)
    _run(search, side_by_side)
    for line in search.standing():
        say(console, line)
    if search.failed:
        console.print(
            f"[red]{search.failed} trials failed[/red]; the same command tries them again"
        )
        raise typer.Exit(1)
    say(console, f"vort tune --collect {out} takes them up")


class Search:
    """Trials of several rows, the next one whenever somebody is free to do it.

    First stages come before second ones, but no row waits for another. The rows' first trials come
    before the second of any: side by side on a GPU, workers then compile kernels of different rows,
    and find those of later trials compiled.

    Attributes:
        failed: how many ended with an error that another attempt may not have.
    """

    def __init__(
        self,
        searches: "Sequence[RowSearch]",
        folder: "RunFolder",
        stages: int = 3,
        seconds: float | None = None,
    ) -> None:
        from vort.lab.experiments.search import known_scores, read_lines

        self.folder, self.stages, self.failed = folder, stages, 0
        self._searches, self._limit, self._began = searches, seconds, perf_counter()
        lines = read_lines()
        self._scores = known_scores(searches, folder, lines)
        self._pace = _pace_of(lines, folder, searches)
        self._running: set[str] = set()
        self._lost: set[str] = set()

    def take(self) -> "Cell | None":
        """The next trial to begin; None where all that can begin would not be over in time."""
        waiting = sorted(self._waiting(), key=lambda found: found[:2])
        for _, _, cell in waiting:
            if self._fits(cell):
                self._running.add(cell.fingerprint)
                return cell
        return None

    def done(self, outcome: "Outcome") -> str:
        """Take in how a trial ended; what to say of it."""
        from vort.lab.experiments.search import line_of
        from vort.lab.report.provenance import provenance

        cell = outcome.cell
        self._running.discard(cell.fingerprint)
        if outcome.broke_down:
            # It would again: that is what it came to.
            self.folder.write(cell, {"error": outcome.error, "made_by": provenance()})
        elif outcome.error:
            self.failed += 1
            self._lost.add(cell.fingerprint)
            return f"failed: {cell.id}: {outcome.error}"
        record = self.folder.read(cell)
        if record is None:
            raise OSError(f"{self.folder.cell(cell)} was written and cannot be read")
        self._pace.learn(record)
        score = self._scores[cell.fingerprint] = line_of(record)["score"]
        came_to = "broke down" if score is None else f"{score:.4f} bits"
        where = f"stage {cell.tags['stage']}  {cell.model}  {cell.tags['trial']}"
        return f"{where}: {came_to}, {record.get('seconds', 0):.0f} s"

    def count(self) -> tuple[int, int]:
        """Trials of these rows that are done, and how many there will be at least.

        Those beyond an edge are known when they come.
        """
        found = [
            (
                s.finished(self._scores, self.stages),
                s.stage(self._scores, self.stages),
                s.planned(self.stages),
            )
            for s in self._searches
        ]
        total = sum(
            max(done + bool(stage), least) if stage else done for done, stage, least in found
        )
        return sum(done for done, _, _ in found), total

    def standing(self) -> list[str]:
        """What each row came to so far, and what is left to do."""
        from vort.lab.experiments.search import line_of, read_lines, searched
        from vort.lab.report.folder import read_cells

        experiment, size = self._searches[0].experiment.name, self._searches[0].cell.size
        here = read_cells(self.folder.part(experiment), []).values()
        lines = [*read_lines(), *(line_of(r) for r in here if "trial" in r.get("cell", {}))]
        found, left = [], Counter[int]()
        for search in self._searches:
            best = searched(f"{experiment}/{search.row}", size, lines)
            stage = search.stage(self._scores, self.stages)
            left[stage] += 1
            words = f", in stage {stage}" if stage else ""
            found.append(f"{search.row}: {best}{words}")
        del left[0]
        if left:
            stages = ", ".join(f"stage {n} of {rows} rows" for n, rows in sorted(left.items()))
            found.append(f"not over yet: {stages}; the same command goes on")
        return found

    def _waiting(self) -> "list[tuple[int, float, Cell]]":
        """Trials that could begin: their stage, their turn in it, and themselves."""
        found = []
        for search in self._searches:
            for turn, cell in enumerate(search.next(self._scores, self.stages)):
                if cell.fingerprint not in self._running | self._lost:
                    stage = int(cell.tags["stage"])
                    # Long ones first where they are few, lest all wait for the last.
                    found.append((stage, turn if stage == 1 else -self._pace.seconds(cell), cell))
        return found

    def _fits(self, cell: "Cell") -> bool:
        if self._limit is None:
            return True
        return perf_counter() - self._began + self._pace.seconds(cell) <= self._limit


def _pace_of(
    lines: "Sequence[object]", folder: "RunFolder", searches: "Sequence[RowSearch]"
) -> "Pace":
    """What is known of how long trials take: from this device's earlier ones, and this folder's."""
    from vort.lab.experiments.run import Pace
    from vort.lab.report.folder import mapping, read_cells
    from vort.lab.report.provenance import provenance

    pace, device = Pace(), provenance()["device"]
    for line in map(mapping, lines):
        if line.get("step_seconds") and line.get("device") == device:
            rest = max(0.0, line["seconds"] - line["steps"] * line["step_seconds"])
            pace.note((line["experiment"], line["row"]), step=line["step_seconds"], rest=rest)
    for name in {search.experiment.name for search in searches}:
        for record in read_cells(folder.part(name), []).values():
            pace.learn(record)
    return pace


def _run(search: Search, workers: int) -> None:
    """Do trials until none is left, with a bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    from vort.lab.experiments.run import run_as_they_come

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Elapsed())
    with Progress(*columns, console=console) as bar:
        done, total = search.count()
        row = bar.add_task("trials", total=total, completed=done)

        def started(cell: "Cell") -> None:
            bar.update(row, description=f"stage {cell.tags['stage']}: {cell.model}")

        try:
            for outcome in run_as_they_come(
                search.take, search.folder, workers=workers, started=started
            ):
                say(bar.console, search.done(outcome))
                done, total = search.count()
                bar.update(row, completed=done, total=total)
        except KeyboardInterrupt:
            console.print("stopped; the same command goes on from here")
            raise typer.Exit(130) from None


def _read_rates(words: str | None) -> tuple[float, ...]:
    """Learning rates as they were typed, in order; none where none were."""
    if words is None:
        return ()
    try:
        found = tuple(sorted({float(word) for word in words.split(",")}))
    except ValueError:
        found = (0.0,)
    if not all(0 < rate < 1 for rate in found):
        raise typer.BadParameter(f"--rates must be numbers between 0 and 1, got {words}")
    return found


def _collect(folder: Path) -> None:
    from vort.lab.experiments.search import collect

    if not folder.is_dir():
        raise typer.BadParameter(f"--collect must be a folder of vort tune, got {folder}")
    number = collect(folder)
    console.print(f"{number} trials taken up")
