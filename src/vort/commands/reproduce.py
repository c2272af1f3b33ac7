"""`vort reproduce`: the paper's claims, redone; a table on the terminal and a report on disk."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

console = Console()


def reproduce(
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("reports"),
    only: Annotated[str | None, typer.Option(help="Parts to run, separated by commas.")] = None,
) -> None:
    """Redo the paper's claims at laptop size; ends with a table and a report folder."""
    wanted = list(PARTS) if only is None else [name.strip() for name in only.split(",")]
    unknown = [name for name in wanted if name not in PARTS]
    if unknown:
        raise typer.BadParameter(f"--only takes {', '.join(PARTS)}, got {', '.join(unknown)}")
    for name in wanted:
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        page = PARTS[name](folder)
        console.print(f"report: [bold]{page}[/bold]")


def _kernel(folder: Path) -> Path:
    from vort.experiments.claims import claims_sheet
    from vort.experiments.kernel import (
        CLAIMS,
        PAPER_HORIZON,
        PAPER_TOLERANCE,
        compare_rules,
        rules_sheet,
    )
    from vort.fractional import PowerLawBasis
    from vort.report.folder import write_report
    from vort.report.kernel_figures import draw_kernels_soe, draw_power_law

    claims = [check() for check in track(CLAIMS, "kernel claims", console=console)]
    basis = PowerLawBasis.fit(PAPER_HORIZON, 8)
    comparison = compare_rules(PAPER_HORIZON, PAPER_TOLERANCE, basis)
    rules = list(track(comparison, "quadratures", total=5, console=console))
    long_basis = PowerLawBasis.fit(10_000, 12)
    figures: dict[str, Callable[[Path], None]] = {
        "power_law.png": lambda path: draw_power_law(path, long_basis),
        "kernels_soe.png": lambda path: draw_kernels_soe(path, PAPER_HORIZON, basis),
    }
    for name, draw in track(figures.items(), "figures", console=console):
        draw(folder / name)
    title = "The paper's kernel claims"
    sheets = [rules_sheet(rules, PAPER_HORIZON), claims_sheet(claims, title)]
    for sheet in sheets:
        console.print(sheet.to_rich())
    record = {
        "claims": [asdict(claim) for claim in claims],
        "rules": [asdict(rule) for rule in rules],
    }
    return write_report(folder, f"{title}, measured", sheets, list(figures), record)


PARTS: dict[str, Callable[[Path], Path]] = {"kernel": _kernel}
