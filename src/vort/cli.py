"""The `vort` command."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

try:
    import typer
    from rich.console import Console
    from rich.progress import track
except ImportError as missing:  # the core does not need them
    sys.exit(f"the vort command needs the extra `lab`: pip install 'vort[lab]' ({missing})")

if TYPE_CHECKING:
    from vort.experiments.claims import Claim
    from vort.experiments.kernel import RuleErrors
    from vort.fractional import PowerLawBasis
    from vort.report.tables import Sheet

app = typer.Typer(
    help="Sequence models with power-law memory.", no_args_is_help=True, add_completion=False
)
console = Console()


@app.callback()
def _about() -> None:
    """Sequence models with power-law memory."""


@app.command()
def kernel(
    horizon: Annotated[int, typer.Option(help="Largest lag.")] = 10_000,
    tolerance: Annotated[
        float | None, typer.Option(help="Relative error to certify; finds the fewest terms.")
    ] = None,
    terms: Annotated[int | None, typer.Option(help="Number of exponentials.")] = None,
    order_min: Annotated[float, typer.Option(help="Lowest order to serve.")] = 0.05,
    plot: Annotated[Path | None, typer.Option(help="Draw figure kernels-soe here.")] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write the basis as .json or .safetensors.")
    ] = None,
) -> None:
    """Choose a shared-rate basis, certify it, and compare it with the paper's quadratures."""
    from vort.experiments.kernel import PAPER_TOLERANCE, compare_rules
    from vort.fractional import PowerLawBasis
    from vort.report.kernel_figures import draw_kernels_soe

    if tolerance is None and terms is None:
        tolerance = 2e-3
    try:
        with console.status("fitting"):
            basis = PowerLawBasis.fit(horizon, terms, tolerance, order_min)
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from problem
    _print_basis(basis)
    with console.status("comparing with the paper's rules"):
        rules = list(compare_rules(horizon, PAPER_TOLERANCE, basis))
    console.print(_rules_sheet(rules, horizon).to_rich())
    if save is not None:
        basis.save(save)
        console.print(f"basis written to {save}")
    if plot is not None:
        with console.status("drawing"):
            draw_kernels_soe(plot, horizon, basis)
        console.print(f"figure written to {plot}")


@app.command()
def reproduce(
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("reports"),
    only: Annotated[str | None, typer.Option(help="Parts to run, separated by commas.")] = None,
) -> None:
    """Redo the paper's claims at laptop size; ends with a table and a report folder."""
    parts = {"kernel": _reproduce_kernel}
    wanted = list(parts) if only is None else [name.strip() for name in only.split(",")]
    unknown = [name for name in wanted if name not in parts]
    if unknown:
        raise typer.BadParameter(f"--only takes {', '.join(parts)}, got {', '.join(unknown)}")
    for name in wanted:
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        parts[name](folder)
        console.print(f"report: [bold]{folder / 'report.md'}[/bold]")


def _reproduce_kernel(folder: Path) -> None:
    from vort.experiments.kernel import CLAIMS, PAPER_HORIZON, PAPER_TOLERANCE, compare_rules
    from vort.fractional import PowerLawBasis
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
    sheets = [_rules_sheet(rules, PAPER_HORIZON), _claims_sheet(claims)]
    for sheet in sheets:
        console.print(sheet.to_rich())
    _write_kernel_report(folder, sheets, list(figures), claims, rules)


def _write_kernel_report(
    folder: Path,
    sheets: "list[Sheet]",
    figures: list[str],
    claims: "list[Claim]",
    rules: "list[RuleErrors]",
) -> None:
    from vort.report.provenance import provenance

    source = provenance()
    pictures = "\n".join(f"![{name}]({name})\n" for name in figures)
    foot = "\n".join(f"- {key}: `{value}`" for key, value in source.items())
    text = "\n".join(sheet.to_markdown() for sheet in sheets)
    (folder / "report.md").write_text(
        f"# The paper's kernel claims, measured\n\n{text}\n{pictures}\n## Made by\n\n{foot}\n"
    )
    record = {
        "made_by": source,
        "claims": [asdict(claim) for claim in claims],
        "rules": [asdict(rule) for rule in rules],
    }
    (folder / "results.json").write_text(json.dumps(record, indent=1) + "\n")


def _print_basis(basis: "PowerLawBasis") -> None:
    certificate = basis.certificate
    console.print(
        f"[bold]{basis.terms} shared rates[/bold] for orders [{basis.order_min:g}, 1] "
        f"and lags 0 to {basis.horizon:,}",
        highlight=False,
    )
    console.print(
        f"  worst relative error {certificate.relative:.2e} (near order "
        f"{certificate.worst_order:.3f}, lag {certificate.worst_lag:,.0f}), "
        f"worst absolute error {certificate.absolute:.2e}",
        highlight=False,
    )
    console.print(f"  established on {certificate.method}", highlight=False, markup=False)
    slow_to_fast = " ".join(f"{rate:.3g}" for rate in basis.rates)
    console.print(f"  rates {slow_to_fast}", highlight=False)


def _rules_sheet(rules: "list[RuleErrors]", horizon: int) -> "Sheet":
    from vort.experiments.kernel import PAPER_BANKS
    from vort.report.tables import Sheet

    headings = (
        "rule",
        "terms",
        "states",
        "rel.",
        "abs.",
        "abs. .5",
        "abs. .9",
        "rounded",
    )
    rows = [
        (
            rule.name,
            str(rule.terms),
            str(rule.states),
            *(f"{x:.1e}" for x in (rule.relative, rule.absolute, rule.at_half)),
            *(f"{x:.1e}" for x in (rule.at_nine_tenths, rule.rounded)),
        )
        for rule in rules
    ]
    title = (
        f"Worst errors for lags 0 to {horizon:,}. A quadrature needs a set of states for each of "
        f"{PAPER_BANKS} banks; `rounded` adds the rounding of an order to its bank"
    )
    return Sheet(title, headings, rows)


def _claims_sheet(claims: "list[Claim]") -> "Sheet":
    from vort.report.tables import Sheet

    headings = ("where", "the paper", "measured", "verdict", "errata")
    rows = [(c.where, c.states, c.measured, c.verdict, c.erratum) for c in claims]
    return Sheet("The paper's kernel claims", headings, rows)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
