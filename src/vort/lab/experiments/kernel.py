"""The paper's kernel claims: theorem soe, figure kernels-soe, and the bounds, all measured."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from vort.fractional import (
    PowerLawBasis,
    SumOfExponentials,
    frequency_response,
    gl_kernel,
    gl_weights,
    laguerre_soe,
    legendre_soe,
)
from vort.fractional.bounds import (
    bank_growth,
    bank_orders,
    quantisation_bound,
    separation_bound,
    separation_error,
)
from vort.fractional.quadrature import integration_interval
from vort.lab.experiments.cell import Size
from vort.lab.experiments.experiment import Experiment, Figure, Record, Summary
from vort.lab.report.tables import Sheet
from vort.lab.verdicts import Claim, judge

__all__ = [
    "KERNEL",
    "PAPER_HORIZON",
    "PAPER_TOLERANCE",
    "RuleErrors",
    "compare_rules",
    "measured_rate",
    "rules_sheet",
]

Array = NDArray[np.float64]

# The paper's settings: section mechanism (K, S, δ is left open) and figure kernels-soe (T, order).
PAPER_BANKS = 10
PAPER_TERMS = 15
PAPER_HORIZON = 1000
PAPER_TOLERANCE = 1e-3
ORDER_MIN = 0.05


@dataclass(frozen=True)
class RuleErrors:
    """How one way to make exponentials does, over the orders it must serve.

    `relative` and `absolute` are worst errors over lags and orders; `at_half` and `at_nine_tenths`
    the worst absolute errors at orders .5 and .9; `rounded` the worst relative error a token of
    any order sees, nearest-bank rounding included.
    """

    name: str
    terms: int
    states: int
    relative: float
    absolute: float
    at_half: float
    at_nine_tenths: float
    rounded: float


def compare_rules(
    horizon: int, tolerance: float, basis: PowerLawBasis, terms: int = PAPER_TERMS
) -> Iterator[RuleErrors]:
    """The paper's rule as printed and as corrected, Gauss–Laguerre, and the shared-rate basis."""
    rules: dict[str, Callable[[float], SumOfExponentials]] = {
        "Legendre, as printed": lambda order: legendre_soe(
            order, terms, horizon, tolerance, corrections=()
        ),
        "Legendre, E1 corrected": lambda order: legendre_soe(
            order, terms, horizon, tolerance, corrections=("E1",)
        ),
        "Legendre, E1 to E4 corrected": lambda order: legendre_soe(
            order, terms, horizon, tolerance
        ),
        "generalised Laguerre": lambda order: laguerre_soe(order, terms),
    }
    for name, rule in rules.items():
        yield _bank_errors(name, rule, terms, horizon)
    yield _basis_errors(basis)


def rules_sheet(rules: Sequence[RuleErrors], horizon: int) -> Sheet:
    """The comparison as a table."""
    headings = ("rule", "terms", "states", "rel.", "abs.", "abs. .5", "abs. .9", "rounded")
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


def worst_error(order: float, terms: int, corrections: tuple[str, ...]) -> float:
    """Worst absolute error of the paper's rule at its own horizon and tolerance."""
    rule = legendre_soe(
        order,
        terms,
        PAPER_HORIZON,
        PAPER_TOLERANCE,
        corrections=corrections,  # type: ignore[arg-type]
    )
    return float(rule.errors(order, PAPER_HORIZON)[0].max())


def measured_rate(order: float, few: int = 8, many: int = 28) -> float:
    """How fast a term lowers the error of the corrected rule: -d log error / dS."""
    errors = [worst_error(order, terms, ("E1", "E2", "E3")) for terms in (few, many)]
    return float(np.log(errors[0] / errors[1]) / (many - few))


def _bank_errors(
    name: str, rule: Callable[[float], SumOfExponentials], terms: int, horizon: int
) -> RuleErrors:
    grid = bank_orders(PAPER_BANKS, ORDER_MIN)
    kernels = [rule(float(order)) for order in grid]
    errors = [soe.errors(float(a), horizon) for soe, a in zip(kernels, grid, strict=True)]
    orders = np.linspace(ORDER_MIN, 1, 96)
    nearest = np.abs(orders[:, None] - grid).argmin(1)
    lags = _lags(horizon)
    exact = gl_kernel(torch.from_numpy(orders)[:, None], torch.from_numpy(lags)).numpy()
    seen = np.stack([kernels[k].kernel(lags) for k in nearest])
    return RuleErrors(
        name=name,
        terms=terms,
        states=terms * PAPER_BANKS,
        relative=float(max(relative.max() for _, relative in errors)),
        absolute=float(max(absolute.max() for absolute, _ in errors)),
        at_half=float(rule(0.5).errors(0.5, horizon)[0].max()),
        at_nine_tenths=float(rule(0.9).errors(0.9, horizon)[0].max()),
        rounded=float(np.abs(seen / exact - 1).max()),
    )


def _basis_errors(basis: PowerLawBasis) -> RuleErrors:
    def absolute_at(order: float) -> float:
        weights = basis.weights(order).numpy()
        return float(SumOfExponentials(basis.rates, weights).errors(order, basis.horizon)[0].max())

    return RuleErrors(
        name="shared rates (ours)",
        terms=basis.terms,
        states=basis.terms,
        relative=basis.certificate.relative,
        absolute=basis.certificate.absolute,
        at_half=absolute_at(0.5),
        at_nine_tenths=absolute_at(0.9),
        rounded=basis.certificate.relative,
    )


def _lags(horizon: int) -> NDArray[np.int64]:
    spread = np.round(np.geomspace(1, horizon, 400)).astype(np.int64)
    return np.unique(np.concatenate([np.arange(min(64, horizon) + 1), spread]))


def _figure_claim() -> Claim:
    printed, corrected = (worst_error(0.5, PAPER_TERMS, c) for c in ((), ("E1",)))
    return Claim(
        "figure kernels-soe (b)",
        "S = 15 gives an error below 4e-3 at order .5, T = 1000",
        f"{printed:.1e} as printed, {corrected:.1e} with the density corrected",
        judge(printed < 4e-3, corrected < 4e-3),
        "E1",
    )


def _theorem_claim() -> Claim:
    orders = (0.1, 0.3, 0.5, 0.7, 0.9, 0.99)
    density_only, corrected = (
        {a: worst_error(a, 60, c) for a in orders} for c in (("E1",), ("E1", "E2", "E3"))
    )
    failing = [a for a in orders if density_only[a] > PAPER_TOLERANCE]
    shown = ", ".join(f"{density_only[a]:.2g} at {a:g}" for a in failing)
    return Claim(
        "theorem soe",
        "error at most 1e-3 on [0, 1000] for every order, given enough terms",
        f"S = 60, density corrected: {shown}; E1 to E4 corrected: {max(corrected.values()):.1e}",
        judge(not failing, max(corrected.values()) <= PAPER_TOLERANCE),
        "E2, E3",
    )


def _rate_claim() -> Claim:
    low, high = integration_interval(0.5, PAPER_HORIZON, PAPER_TOLERANCE, corrections=("E1",))
    length, rate = np.log(high / low), measured_rate(0.5)
    return Claim(
        "figure kernels-soe (b), caption",
        "the error falls as exp(-π² S / L) with L ≈ 6.9: a factor of 4.2 a term",
        f"a factor of {np.exp(rate):.2f} a term; L is {length:.1f}, with which exp(-π² S / L) is "
        f"{np.exp(np.pi**2 / length):.2f} and exp(-2π S / L) is {np.exp(2 * np.pi / length):.2f}",
        judge(rate >= 0.9 * np.pi**2 / 6.9, rate >= 0.9 * np.pi**2 / length),
        "E11, E15",
    )


def _laguerre_claim() -> Claim:
    relative = laguerre_soe(0.5, 64).errors(0.5, PAPER_HORIZON)[1]
    return Claim(
        "abstract",
        "Gauss-Laguerre quadrature gives uniform accuracy on [1, T]",
        f"S = 64, order .5: {relative[100]:.0%} off at lag 100, {relative[1000]:.0%} at lag 1000",
        judge(float(relative.max()) < 0.01),
        "E5",
    )


def _mixture_claim() -> Claim:
    basis = PowerLawBasis.fit(PAPER_HORIZON, 5, order_min=0.65)
    return Claim(
        "section experiments, results",
        "five exponentials stay a nontrivial distance from order .7 on [1, 1000]",
        f"five well-placed rates are within {basis.certificate.relative:.1%} of every order in "
        "[.65, 1] at every lag to 1000",
        judge(basis.certificate.relative > 0.1),
        "E9, E13",
    )


def _quantisation_claim() -> Claim:
    draw = np.random.default_rng(0)
    ratios = []
    for low, high in np.sort(draw.uniform(ORDER_MIN, 1, (500, 2))):
        lag = 10 ** draw.uniform(0, 6)
        values = [lag ** (a - 1) / float(torch.lgamma(torch.tensor(a)).exp()) for a in (low, high)]
        bound = float(quantisation_bound(low, high, lag, order_min=ORDER_MIN))
        ratios.append(abs(values[1] - values[0]) / bound)
    return Claim(
        "theorem quant",
        "|k_b - k_a| is within the stated bound",
        f"largest ratio to the bound over 500 random pairs and lags: {max(ratios):.3f}",
        judge(max(ratios) <= 1),
        "E10",
    )


def _separation_claim() -> Claim:
    draw = np.random.default_rng(0)
    slack = []
    for _ in range(500):
        count = draw.integers(1, 6)
        mixture = draw.uniform(0, 2, count), 10 ** draw.uniform(-3, 0.5, count)
        order, steps = draw.uniform(0.05, 1), 10 ** draw.uniform(0.5, 6)
        error = separation_error(order, *mixture, steps)
        slack.append((error - separation_bound(order, *mixture, steps)) / (1 + abs(error)))
    return Claim(
        "proposition separation",
        "a mixture with slowest rate Λ is off by at least N(T) - C(Λ) in energy",
        f"holds in 500 random mixtures, also without the paper's C_f² R (least slack "
        f"{min(slack):.1e})",
        judge(min(slack) >= -1e-9),
        "E9",
    )


def _growth_claim() -> Claim:
    draw = np.random.default_rng(0)
    ratios = []
    for order in draw.uniform(0.01, 1, 200):
        exact, power = bank_growth(float(order), int(10 ** draw.uniform(0, 5)))
        ratios.append(exact / power)
    reached = max(_reached(order) for order in (0.3, 0.5, 0.7, 0.9))
    return Claim(
        "proposition bankgrowth",
        "a bank's state grows as t^a / Γ(a + 1) at most",
        f"largest ratio to that power over 200 random orders and lengths: {max(ratios):.4f}; "
        f"states of eq. aux-recurrence, fed with equal tokens for {PAPER_HORIZON:,} steps: "
        f"{reached:.4f}",
        judge(max(ratios) <= 1 + 1e-12 and reached <= 1),
        "E8",
    )


def _reached(order: float) -> float:
    """|M_t| over its bound at the last step, for equal tokens of norm 1, by the recurrences."""
    rule = legendre_soe(order, 40, PAPER_HORIZON, PAPER_TOLERANCE / 10)
    state = rule.states(np.ones((PAPER_HORIZON, 1)))[-1].sum()
    return float(state / bank_growth(order, PAPER_HORIZON)[1])


def _transform_claim() -> Claim:
    omega = torch.logspace(-4, 0, 50, dtype=torch.float64)
    modulus = frequency_response(0.6, omega).abs()
    slope = float((modulus[1].log() - modulus[0].log()) / (omega[1].log() - omega[0].log()))
    return Claim(
        "lemma ztransform",
        "|W(e^iω)| = |2 sin(ω/2)|^-a, which falls as ω^-a",
        f"log-log slope {slope:.6f} at ω = 1e-4 for order .6",
        judge(abs(slope + 0.6) < 1e-6),
    )


def _predictor_claim() -> Claim:
    memory = 0.3
    # (1 - B)^d = 1 - Σ π_j B^j, by the recurrence of its binomial series.
    coefficients = np.cumprod([(j - 1 - memory) / j for j in range(1, 100_001)])
    slope = np.log(coefficients[-1] / coefficients[9999]) / np.log(10)
    moving_average = gl_weights(memory, 100_000).numpy()
    growing = np.log(moving_average[-1] / moving_average[10_000]) / np.log(10)
    return Claim(
        "section background, long-memory processes",
        "the best predictor of an ARFIMA(0, d, 0) series weighs lag j as j^(d-1)",
        f"it weighs it as j^{slope:.2f} at d = .3 (that is -d-1); j^{growing:.2f} are the weights "
        "of past shocks, not of past values",
        judge(abs(slope - (memory - 1)) < 0.01),
        "E17",
    )


def _break_even_claim() -> Claim:
    banks, terms, features, width = PAPER_BANKS, PAPER_TERMS, 64, 512
    retention = banks * terms * features * width
    return Claim(
        "section experiments, complexity",
        "break-even with attention at n = O(K S d_phi / d), about 19 positions at d = 512",
        f"n² d = n K S d_phi d_v at n = {retention // width:,}",
        judge(retention / width < 2 * banks * terms * features / width),
        "E19",
    )


CLAIMS: tuple[Callable[[], Claim], ...] = (
    _figure_claim,
    _theorem_claim,
    _rate_claim,
    _laguerre_claim,
    _mixture_claim,
    _quantisation_claim,
    _separation_claim,
    _growth_claim,
    _transform_claim,
    _predictor_claim,
    _break_even_claim,
)


def _summarise(records: Sequence[Record], size: Size) -> Summary:
    """Every claim checked and every rule compared: nothing is trained, so nothing is kept."""
    basis = PowerLawBasis.fit(PAPER_HORIZON, 8)
    rules = list(compare_rules(PAPER_HORIZON, PAPER_TOLERANCE, basis))

    def draw_power_laws(path: Path) -> None:
        from vort.lab.report.figures.kernels import draw_power_law

        draw_power_law(path, PowerLawBasis.fit(10_000, 12))

    def draw_rules(path: Path) -> None:
        from vort.lab.report.figures.kernels import draw_kernels_soe

        draw_kernels_soe(path, PAPER_HORIZON, basis)

    def draw_states(path: Path) -> None:
        from vort.lab.report.figures.kernels import draw_growth

        draw_growth(path)

    figures = [
        Figure(
            "power_law.png",
            "Power-law kernels against exponentials, and the shared rates behind one.",
            draw_power_laws,
        ),
        Figure(
            "kernels_soe.png",
            "Figure kernels-soe, measured: kernels, convergence, relative error.",
            draw_rules,
        ),
        Figure(
            "bank_growth.png",
            "The memory without keys, from its recurrences (eq. aux-recurrence, bank-update): "
            "norms against proposition bankgrowth.",
            draw_states,
        ),
    ]
    return Summary(
        [rules_sheet(rules, PAPER_HORIZON)],
        [check() for check in CLAIMS],
        figures,
        more={"rules": [asdict(rule) for rule in rules]},
    )


KERNEL = Experiment(
    name="kernel",
    title="The paper's kernel claims",
    about="The kernel, its quadratures and the theorems about them, with no training.",
    summarise=_summarise,
    direct=True,
)
