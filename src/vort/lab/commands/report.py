"""`vort report`: everything that a run left behind, on one page."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

console = Console()


def report(
    run_dir: Annotated[Path, typer.Argument(help="Folder that `vort reproduce` wrote to.")],
    out: Annotated[
        Path | None, typer.Option(help="Page to write; report.html in the run folder if absent.")
    ] = None,
) -> None:
    """Write one self-contained HTML page: verdicts, tables, curves, figures, commands."""
    from vort.lab.report.run_page import write_report_page

    target = run_dir / "report.html" if out is None else out
    try:
        run = write_report_page(run_dir, target)
    except (OSError, ValueError) as problem:
        raise typer.BadParameter(str(problem)) from problem
    for problem_text in run.problems:
        console.print(f"left out: {problem_text}", style="yellow", markup=False, soft_wrap=True)
    size = target.stat().st_size / 1e6
    console.print(f"report: [bold]{target}[/bold] ({size:.1f} MB)", highlight=False)
