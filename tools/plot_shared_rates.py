"""Draw docs/assets/shared_rates.png: what orders write to shared rates, against the paper's banks.

python tools/plot_shared_rates.py
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vort.fractional import PowerLawBasis, gl_weights
from vort.lab.report.figures.style import BLUE, ORANGE, SERIES, figure
from vort.ops import paper_banks

ROOT = Path(__file__).parents[1]
HORIZON, TERMS, BANKS, BANK_SCALES = 1_000, 8, 10, 15
ORDERS = (0.3, 0.5, 0.7, 0.9)


def main() -> None:
    target = ROOT / "docs" / "assets" / "shared_rates.png"
    basis = PowerLawBasis.fit(HORIZON, TERMS)
    with figure(target, 2, 9.6, 3.7) as (left, right):
        _weights(left, basis)
        _errors(right, basis)
    print(target.relative_to(ROOT))


def _weights(axis: Any, basis: PowerLawBasis) -> None:
    scales = [f"{1 / rate:,.1f}" if rate > 0.1 else f"{1 / rate:,.0f}" for rate in basis.rates[1:]]
    names = [*scales[::-1], "never"]
    for order, colour, marker in zip(ORDERS, SERIES, "os^D", strict=True):
        weights = basis.weights(order).numpy()[[*range(len(scales), 0, -1), 0]]
        axis.plot(names, weights, marker + "-", color=colour, label=f"order {order}")
    axis.set(
        xlabel="steps until a state has fallen to 1/e",
        ylabel="weight written",
        title=f"One token, {basis.terms} states: the order decides who gets what",
    )
    axis.tick_params(axis="x", labelsize=8)
    axis.legend(fontsize=8)


def _errors(axis: Any, basis: PowerLawBasis) -> None:
    orders = torch.linspace(basis.order_min, 1, 400, dtype=torch.float64)
    exact = gl_weights(orders, HORIZON)
    lags = torch.arange(HORIZON + 1, dtype=torch.float64)
    write, log_decay = paper_banks(orders.view(1, -1, 1), BANKS, BANK_SCALES, HORIZON)
    banks = write[0, :, 0] @ torch.exp(log_decay[:, None] * lags)
    shared = basis.kernel(orders[:, None], lags)
    label = f"{BANKS} banks of {BANK_SCALES} terms, E1 to E4 corrected: {len(log_decay)} states"
    axis.semilogy(orders, _worst(banks, exact), color=ORANGE, label=label)
    axis.semilogy(
        orders, _worst(shared, exact), color=BLUE, label=f"shared rates: {basis.terms} states"
    )
    axis.set(
        xlabel="order of the token",
        ylabel=f"worst relative error, lags 0 to {HORIZON:,}",
        ylim=(3e-5, 60),
        title="The kernel a token gets",
    )
    axis.legend(fontsize=8)


def _worst(kernel: Tensor, exact: Tensor) -> Tensor:
    return (kernel / exact - 1).abs().amax(1).clamp_min(1e-6)


if __name__ == "__main__":
    main()
