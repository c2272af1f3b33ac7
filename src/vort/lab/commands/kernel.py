"""`vort kernel`: choose a basis, see its certificate, compare it with the paper's quadratures."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from vort.lab.commands import check_writable, say

if TYPE_CHECKING:
    from vort.fractional import PowerLawBasis

console = Console()
_PICTURES, _BASES = (".png", ".svg", ".pdf"), (".json", ".safetensors")


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
    from vort.fractional import PowerLawBasis
    from vort.lab.experiments.kernel import PAPER_TOLERANCE, compare_rules, rules_sheet
    from vort.lab.report.figures.kernels import draw_kernels_soe

    for option, path, kinds in (("--plot", plot, _PICTURES), ("--save", save, _BASES)):
        if path is not None and path.suffix not in kinds:
            raise typer.BadParameter(f"{option} must end in {' or '.join(kinds)}, got {path}")
        if path is not None:
            check_writable(path, option)
    if tolerance is None and terms is None:
        tolerance = 2e-3
    with console.status("fitting"):
        basis = PowerLawBasis.fit(horizon, terms, tolerance, order_min)
    if save is not None:
        save.parent.mkdir(parents=True, exist_ok=True)
        basis.save(save)
    _print_basis(basis)
    with console.status("comparing with the paper's rules"):
        rules = list(compare_rules(horizon, PAPER_TOLERANCE, basis))
    console.print(rules_sheet(rules, horizon).to_rich())
    if save is not None:
        say(console, f"basis written to {save}")
    if plot is not None:
        with console.status("drawing"):
            draw_kernels_soe(plot, horizon, basis)
        say(console, f"figure written to {plot}")


def _print_basis(basis: "PowerLawBasis") -> None:
    certificate = basis.certificate
    rates = " ".join(f"{rate:.3g}" for rate in basis.rates)
    lines = [
        f"{basis.terms} shared rates for orders [{basis.order_min:g}, 1] "
        f"and lags 0 to {basis.horizon:,}",
        f"  worst relative error {certificate.relative:.2e} (near order "
        f"{certificate.worst_order:.3f}, lag {certificate.worst_lag:,.0f}), "
        f"worst absolute error {certificate.absolute:.2e}",
        f"  established on {certificate.method}",
        f"  rates {rates}",
    ]
    for line in lines:
        say(console, line)
