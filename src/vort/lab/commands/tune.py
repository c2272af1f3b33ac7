"""`vort tune`: a learning rate for every model, with the same budget for all."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vort.files import write_atomically
from vort.lab.commands import books_of, read_size, read_workers

console = Console()


def tune(
    experiment: Annotated[str, typer.Argument(help="pilot, label_copy, books, ...")],
    scale: Annotated[str, typer.Option(help="laptop or paper.")] = "laptop",
    models: Annotated[str | None, typer.Option(help="Rows to tune; all by default.")] = None,
    share: Annotated[float, typer.Option(help="Share of a cell's training in a trial.")] = 0.5,
    workers: Annotated[int | None, typer.Option(help="Trials side by side.")] = None,
    data: Annotated[
        Path | None, typer.Option(envvar="VORT_DATA", help="Folder with books/, for --scale paper.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for trials; finished ones are kept.")] = Path(
        "reports/tuning"
    ),
) -> None:
    """Try settings on validation data and write what came out best to OUT/search.json.

    Trials use seed 100, which no table uses. The file goes to
    src/vort/lab/experiments/search.json to be taken up.
    """
    from rich.progress import track

    from vort.lab.experiments import EXPERIMENTS
    from vort.lab.experiments.cell import RunFolder
    from vort.lab.experiments.run import run_cells
    from vort.lab.experiments.search import best_of, search_cells
    from vort.names import check_choice

    size, side_by_side, folder = read_size(scale), read_workers(workers), RunFolder(out)
    names = None if models is None else [name.strip() for name in models.split(",")]
    known = [table.name for table in EXPERIMENTS.values() if table.searchable]
    check_choice("experiment", experiment, known)
    table = EXPERIMENTS[experiment]
    cells = search_cells(table, size, names, share, books_of(data))
    if not cells:
        nothing = " ".join(table.summarise([], size).notes)
        raise typer.BadParameter(f"{experiment} has no cells to tune at --scale {size}. {nothing}")
    missing = [cell for cell in cells if not folder.finished(cell)]
    done = run_cells(missing, folder, workers=side_by_side)
    for outcome in track(done, "trials", total=len(missing), console=console):
        if outcome.error:
            console.print(f"[red]broke down[/red] {outcome.cell.id}: {outcome.error}", markup=True)
    found = best_of(table, cells, folder)
    path = out / "search.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    record.setdefault(size, {}).setdefault(experiment, {}).update(found)
    write_atomically(path, json.dumps(record, indent=1) + "\n")
    for name, entry in found.items():
        edge = " (at the edge of what was tried)" if entry["at_edge"] else ""
        console.print(f"{name}: {entry['best']}{edge}")
    console.print(f"written: [bold]{path}[/bold]")
