"""`vort tune`: a learning rate for every model, with the same budget for all."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

console = Console()


def tune(
    experiment: Annotated[str, typer.Argument(help="pilot, label_copy or books.")],
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
    """Try settings on validation data and write what came out best to OUT/tuned.json.

    Trials use seed 100, which no table uses. The file goes to
    src/vort/lab/experiments/tuned.json to be taken up.
    """
    from rich.progress import track

    from vort.lab.commands.reproduce import books_of
    from vort.lab.experiments.cell import SCALES, finished
    from vort.lab.experiments.runner import default_workers, run_cells
    from vort.lab.experiments.tuning import best_of, search_cells

    if scale not in SCALES:
        raise typer.BadParameter(f"--scale takes {' or '.join(SCALES)}, got {scale}")
    names = None if models is None else [name.strip() for name in models.split(",")]
    try:
        cells = search_cells(experiment, scale, names, share, books_of(data))
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from problem
    missing = [cell for cell in cells if not finished(cell, out)]
    side_by_side = default_workers() if workers is None else workers
    done = run_cells(missing, out, workers=side_by_side)
    for outcome in track(done, "trials", total=len(missing), console=console):
        if outcome.error:
            console.print(f"[red]broke down[/red] {outcome.cell.id}: {outcome.error}", markup=True)
    found = best_of(cells, out)
    path = out / "tuned.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    record.setdefault(scale, {}).setdefault(experiment, {}).update(found)
    path.write_text(json.dumps(record, indent=1) + "\n")
    for name, entry in found.items():
        edge = " (at the edge of what was tried)" if entry["at_edge"] else ""
        console.print(f"{name}: {entry['best']}{edge}")
    console.print(f"written: [bold]{path}[/bold]")
