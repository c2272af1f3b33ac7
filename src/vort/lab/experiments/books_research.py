"""Ideas about VORT, one row each, against VORT as it is: on validation books, never on test books.

An idea stands here with what is expected of it, written down before anything was trained. What came
of it is computed from the cells by the rule of `outcome`; `docs/experiments.md` shows both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from vort.lab.experiments.books import NO_BOOKS, NOT_PG19
from vort.lab.experiments.books_deep import (
    BOOKS_DEEP,
    Row,
    bits_sheet,
    differences_sheet,
    of_row,
    shown,
)
from vort.lab.experiments.cell import Cell, Size
from vort.lab.experiments.experiment import Experiment, Record, Summary
from vort.lab.experiments.origins import rates_note
from vort.lab.experiments.reading import differences
from vort.lab.experiments.scores import as_planned, by_row, label_of
from vort.lab.report.tables import Sheet
from vort.lab.training.metrics import Interval

__all__ = ["BOOKS_RESEARCH", "IDEAS", "Idea", "ideas_sheet", "outcome"]

Outcome = Literal["kept", "dropped", "open", "compared", "not yet run"]

BASELINE = "vort"
# The row of table books-deep that ideas are tried on: VORT as it was before any of them was kept.
_TRIED_ON = "vort_even"
# Bits below which a difference is not worth a setting.
WORTH = 0.002


@dataclass(frozen=True)
class Idea:
    """A row: VORT of table books-deep, but for its settings.

    Attributes:
        name: of its cells.
        label: for people.
        prediction: what was expected before it was run.
        settings: of `VortConfig`, where they differ.
        compares: whether it is there to be compared with and is not itself proposed.
        added_to: the idea that it adds something to, and is held against; by default VORT as it is.
    """

    name: str
    label: str
    prediction: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    compares: bool = False
    added_to: str = ""


IDEAS: tuple[Idea, ...] = (
    Idea(
        "no_output_gate",
        "no output gate",
        "Costs .01 to .03 bits at every position: a layer cannot say that it has found nothing.",
        {"output_gate": False},
    ),
    Idea(
        "learned_rates",
        "rates learned, from where the basis has them",
        "Gains less than .003 bits: read weights choose among twelve rates already.",
        {"learn_basis": True},
    ),
    Idea(
        "fewer_low_scales",
        "fewer scales in lower layers (4, 8, 12, 12)",
        "Costs less than .003 bits at four fifths of the state: lower layers look nearby.",
        {"layer_settings": [{"num_scales": 4}, {"num_scales": 8}, {}, {}]},
    ),
    Idea(
        "layer_horizons",
        "short horizons in lower layers (256, 2,048, 8,192, 8,192)",
        "Changes less than .003 bits: a basis for 8,192 is exact at short lags too.",
        {"layer_settings": [{"horizon": 256}, {"horizon": 2048}, {}, {}]},
    ),
    Idea(
        "half_windows",
        "a window in the first and third layer only",
        "Costs .005 to .02 bits, most of it below 256 positions: a convolution of four is no "
        "window.",
        {"layer_settings": [{}, {"sliding_window": 0}]},
    ),
    # These two after the first seed of the ideas above and below, before any of their own.
    Idea(
        "first_window",
        "a window in the first layer only",
        "Costs less than .005 bits, half of the windows having cost .001: what lies next to a "
        "token is mostly settled in the first layer.",
        {"layer_settings": [{}, *({"sliding_window": 0} for _ in range(3))]},
    ),
    Idea(
        "lean",
        "a window in the first and third layer only, no entropy for the router",
        "Within .003 bits of the baseline, as either was alone.",
        {"layer_settings": [{}, {"sliding_window": 0}], "use_entropy": False},
    ),
    Idea(
        "half_memories",
        "memory in the second and fourth layer only",
        "Costs .003 to .01 bits beyond 256 positions and nothing below, for half of the state.",
        {"layer_memories": ["none", "vort"]},
    ),
    Idea(
        "more_features",
        "twice the features, half the scales (128, S = 6)",
        "Costs .003 to .01 bits: more scales helped where more features did not.",
        {"num_features": 128, "num_scales": 6},
    ),
    Idea(
        "more_scales",
        "half the features, twice the scales (32, S = 24)",
        "Within .003 bits of the baseline: twelve scales are within a thousandth of every order.",
        {"num_features": 32, "num_scales": 24},
    ),
    Idea(
        "order_of_values",
        "orders from the convolved values",
        "Gains less than .003 bits: above the first layer hidden states know their neighbours.",
        {"order_input": "values"},
    ),
    Idea(
        "one_start",
        "all orders start at .7",
        "Costs .01 to .02 bits: heads that begin alike take long to part.",
        {"order_start": 0.7},
    ),
    Idea(
        "mixed_start",
        "half of the heads start apart, half at .7",
        "Within .003 bits of heads that all start apart: two of them are enough to begin with.",
        {"order_start": [0.25, 0.95, 0.7, 0.7]},
    ),
    Idea(
        "no_entropy",
        "no entropy for the router",
        "Costs less than .003 bits.",
        {"use_entropy": False},
    ),
    Idea(
        "no_own_token",
        "tokens do not read what they write themselves",
        "Costs .005 to .015 bits: a layer without its own token has one way less around.",
        {"include_self": False},
    ),
    Idea(
        "no_memory",
        "no memory, to see where it costs",
        "Costs .02 bits beyond 256 positions; below 64, where a window sees all, nothing.",
        {"memory": "none"},
        compares=True,
    ),
    # These after table books-deep, where one rate for each head was ahead of VORT.
    Idea(
        "spread_reading",
        "heads begin to read around time scales of their own",
        "Gains .003 to .01 bits: a mixture that reads all its rates alike at first ends .013 bits "
        "behind one rate for each head, and reading weights hardly leave their start.",
        {"read_start": "spread"},
    ),
    Idea(
        "long_horizon",
        "horizon 131,072, as far as tables read",
        "Changes less than .002 bits up to 8,192, where the basis is a little less exact; gains "
        "only beyond, where lags past the horizon weigh as much as those at it.",
        {"horizon": 131072},
    ),
    Idea(
        "leak",
        "the slowest scale forgets over the horizon",
        "Changes less than .002 bits up to 8,192, and gains beyond, where what never fades would "
        "grow without end.",
        {"leak": True},
    ),
    Idea(
        "spread_and_leak",
        "both: heads read around scales of their own, the slowest forgets",
        "As much as both alone.",
        {"read_start": "spread", "leak": True},
        added_to="spread_reading",
    ),
    Idea(
        "one_rate_a_head",
        "one learned rate for each head, to see what it has that VORT lacks",
        "Within .005 bits of the baseline up to 2,048, fewer bits beyond.",
        {"memory": "exponential"},
        compares=True,
    ),
    # Last: other kernels than ours, which are compiled first.
    Idea(
        "erasing",
        "tokens replace what their key finds, in every second layer (Gated DeltaNet there)",
        "Within .005 bits of the baseline: erasing gains what is lost with the scales.",
        {"layer_memories": ["vort", "gated_delta"]},
    ),
    # After Zipf retrieval at the paper's size, where a mixture whose tokens write to each scale as
    # they please finds everything and VORT does not in every seed.
    Idea(
        "free_writes",
        "a gain of the token for each scale",
        "Gains less than .003 bits: an order for each token brings nothing that one for each head "
        "does not, so what a token may say of how long it is kept is not what books lack.",
        {"write_gain": "scale"},
    ),
    Idea(
        "spread_and_free",
        "heads that begin to read apart, and a gain of the token for each scale",
        "Within .003 bits of heads that begin to read apart alone, for the same reason.",
        {"read_start": "spread", "write_gain": "scale"},
        added_to="spread_reading",
    ),
)

# The rate that all had before any was searched, so that ideas old and new compare.
_TRAINING = {
    "steps": 450,
    "evaluation_sequences": 200,
    "test_sequences": 0,
    "learning_rate": 3e-3,
}
_READING: dict[str, Any] = {
    "lengths": (8192,),
    # Finer than other tables where a window of 128 sees all or most.
    "bounds": (64, 128, 256, 1024, 2048, 4096),
    "split": "validation",
}
_SEEDS = (0, 1)


def cells(size: Size, data: Path | None = None) -> list[Cell]:
    """The baseline and all ideas, the first seed of all first; none at laptop size."""
    if size != "paper":
        return []
    found = (cell for cell in BOOKS_DEEP.cells(size, data) if cell.model == _TRIED_ON)
    return [
        _of_idea(cell, name, settings)
        for cell in found
        if cell.seed in _SEEDS
        for name, settings in [(BASELINE, {}), *((idea.name, idea.settings) for idea in IDEAS)]
    ]


def _of_idea(cell: Cell, name: str, settings: Mapping[str, Any]) -> Cell:
    """A cell of table books-deep, with an idea's settings and a shorter training."""
    return replace(
        cell,
        experiment=BOOKS_RESEARCH.name,
        model=name,
        config={**cell.config, **settings},
        training={**cell.training, **_TRAINING},
        after={"reading": _READING},
        search="",
    )


def outcome(books: Interval, seeds: Sequence[float], saves: bool) -> Outcome:
    """What becomes of an idea, by the bits that it needs more than VORT over all positions.

    An idea is *kept* where it needs fewer bits: the interval over books lies below zero, and every
    seed says the same. It is *dropped* where that interval leaves it no gain of .002 bits. One
    that saves state is kept where the interval leaves no cost of .002 bits, and dropped where all
    of it lies above zero. Otherwise, and after one seed, an idea is *open*. So where an idea leaves
    a part out and is dropped, the part stays.

    Args:
        books: interval of the difference over books, its mean over seeds.
        seeds: the difference in each seed.
        saves: whether its state is smaller.
    """
    if len(seeds) < 2:
        return "open"
    if books.high < 0 and max(seeds) < 0:
        return "kept"
    if saves and books.high < WORTH:
        return "kept"
    return "dropped" if books.low > (0 if saves else -WORTH) else "open"


def ideas_sheet(records: Sequence[Record]) -> Sheet:
    """Every idea with what was expected of it and what came, or that it was not yet run."""
    found = by_row(as_planned(records))
    rows = {name: of_row(members) for name, members in found.items()}
    lines = []
    for idea in IDEAS:
        change, state, verdict = _came_of(idea, rows, found)
        lines.append([idea.label, idea.prediction, change, state, verdict])
    headings = ["idea", "predicted", "bits more, over all", "state", "outcome"]
    return Sheet("Ideas", headings, lines)


def _came_of(
    idea: Idea, rows: Mapping[str, Row], found: Mapping[str, Sequence[Record]]
) -> tuple[str, str, Outcome]:
    """Difference, state against that of the row it is held against, outcome."""
    key, before = (_READING["lengths"][-1], None), idea.added_to or BASELINE
    ours, own = (rows.get(name, {}).get(key, {}) for name in (before, idea.name))
    seeds = sorted(ours.keys() & own.keys())
    if not seeds:
        return "", "", "not yet run"
    whole = differences(ours, own)["all"]
    each = [differences({s: ours[s]}, {s: own[s]})["all"].books.mean for s in seeds]
    states = [found[name][0]["state_numbers"] for name in (idea.name, before)]
    verdict = outcome(whole.books, each, states[0] < states[1])
    share = f"{states[0] / states[1]:.0%}"
    change = shown(whole) + (f" than: {_label(before)}" if idea.added_to else "")
    return change, share, "compared" if idea.compares else verdict


def summarise(records: Sequence[Record], size: Size) -> Summary:
    """Ideas with their outcomes; bits by position; what ideas need more in each class."""
    if not records:
        return Summary([], notes=[NO_BOOKS] if size == "paper" else [])
    rows = {name: of_row(members) for name, members in by_row(records).items()}
    planned = {name: of_row(members) for name, members in by_row(as_planned(records)).items()}
    length, trained = _READING["lengths"][-1], records[0]["task"]["length"]
    sheets = [
        ideas_sheet(records),
        differences_sheet(length, planned, _label),
        bits_sheet(length, rows, records, trained, _label),
    ]
    labels = {record["cell"]["model"]: _label(record["cell"]["model"]) for record in records}
    return Summary([s for s in sheets if s.rows], notes=_notes(records), labels=labels)


def _label(row: str) -> str:
    name, bracket, changes = row.partition(" [")
    known = {idea.name: idea.label for idea in IDEAS}
    return known.get(name, label_of(name)) + bracket + changes


def _notes(records: Sequence[Record]) -> list[str]:
    sizes = sorted({record["parameters"] for record in records})
    steps = sorted({record["steps"] for record in records})
    return [
        f"Validation books; test books were not read. Parameters: {sizes[0]:,} to {sizes[-1]:,}. "
        "State: numbers kept for one sequence while decoding, beside those of the baseline.",
        f"Optimiser steps: {', '.join(f'{s:,}' for s in steps)}. {rates_note(records)} All ideas "
        "take the rate of the baseline.",
        "Differences are taken window by window and seed by seed; less than zero is fewer bits. "
        "Behind ± the interval over books, 95 %, Student's t; behind the stroke that over seeds, "
        "which for two is wide whatever they say." + _spread(records),
        NOT_PG19,
    ]


def _spread(records: Sequence[Record]) -> str:
    """How far apart the baseline's seeds are: chance that all differences have in common."""
    own = [record for record in as_planned(records) if record["cell"]["model"] == BASELINE]
    kept = of_row(own).get((_READING["lengths"][-1], None), {})
    bits = [reading.mean()["all"] for reading in kept.values()]
    if len(bits) < 2:
        return ""
    apart = max(bits) - min(bits)
    return (
        f" All differences share the runs of the baseline, whose seeds lie {apart:.4f} bits apart: "
        "what is chance in these is in every row alike."
    )


BOOKS_RESEARCH = Experiment(
    name="books_research",
    title="Ideas, on validation books (4 layers of 256)",
    about="VORT of table books-deep and one change at a time, each with what was expected of it "
    "before it was run. Trained on windows of 2,048 for fewer steps than in that table, read to "
    "8,192 on validation books.",
    cells=cells,
    summarise=summarise,
)
