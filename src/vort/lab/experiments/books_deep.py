"""Tables books-deep: deep models on books, read far beyond the length they were trained at."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from vort.lab.experiments.books import NO_BOOKS, NOT_PG19, with_books
from vort.lab.experiments.cell import Cell, Size
from vort.lab.experiments.experiment import Experiment, Figure, Record, Summary
from vort.lab.experiments.models import MODELS, sized
from vort.lab.experiments.origins import rates_note
from vort.lab.experiments.reading import (
    Difference,
    Reading,
    between_classes,
    differences,
    readings,
)
from vort.lab.experiments.scores import (
    as_planned,
    by_row,
    label_of,
    labels_of,
    seed_interval,
    show,
)
from vort.lab.experiments.search import first_searched, model_settings
from vort.lab.report.tables import Sheet
from vort.lab.verdicts import Claim, judge_lead

__all__ = [
    "BOOKS_DEEP",
    "BOOKS_DEEPER",
    "Row",
    "bits_sheet",
    "deep_cell",
    "differences_sheet",
    "of_row",
    "shown",
]

# The first is what all others are held against.
ROWS = (
    *("vort", "vort_first_window", "vort_s8", "exponential_learned_gated", "mixture_rates_gated"),
    *("uniform_power_law_gated", "gla", "mamba2", "gated_delta", "softmax", "none"),
    *("hybrid_vort", "hybrid_gla", "exponential_first_window", "mixture_rates_first_window"),
    "vort_even",
)
# Heads of these begin to read around time scales of their own, as `VortConfig()` has it; an
# exponential's heads have begun so all along.
_SPREAD = (
    *("vort", "vort_first_window", "vort_s8", "mixture_rates_gated", "uniform_power_law_gated"),
    *("hybrid_vort", "mixture_rates_first_window"),
)
# What VORT with fewer windows is held against: rivals that have as few.
_FEW_WINDOWS = ("exponential_first_window", "mixture_rates_first_window")
# Rows beside the question which memory is best: fewer windows, and how heads begin to read. They
# are left to the size that can tell them apart and to the models of which there are three seeds,
# and out of the picture: one of all rows is one of none.
_BESIDE = ("vort_first_window", *_FEW_WINDOWS, "vort_even")
_LACKS: dict[tuple[str, Size], tuple[str, ...]] = {
    ("books_deep", "laptop"): _BESIDE,
    # Gated DeltaNet trains in its PyTorch form alone on Hopper, for half of the table's time.
    ("books_deeper", "paper"): (*_BESIDE, "gated_delta"),
}
# Rivals whose time is linear in length.
LINEAR = (
    *("exponential_learned_gated", "mixture_rates_gated", "uniform_power_law_gated"),
    *("gla", "mamba2", "gated_delta", "none"),
)

_SHARED: dict[str, Any] = {
    "num_scales": 12,
    "output_gate": True,
    "conv_size": 4,
    "tie_word_embeddings": False,
}
# Layers, width, heads; seconds at laptop size.
_MODEL: dict[str, dict[Size, dict[str, Any]]] = {
    "books_deep": {
        "laptop": {
            **_SHARED,
            "num_hidden_layers": 4,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "sliding_window": 16,
            "horizon": 1024,
        },
        "paper": {
            **_SHARED,
            "num_hidden_layers": 4,
            "hidden_size": 256,
            "num_attention_heads": 4,
            "sliding_window": 128,
            "horizon": 8192,
        },
    },
    "books_deeper": {
        "paper": {
            **_SHARED,
            "num_hidden_layers": 8,
            "hidden_size": 512,
            "num_attention_heads": 8,
            "sliding_window": 128,
            "horizon": 8192,
        },
    },
}
_TASK: dict[Size, dict[str, Any]] = {
    "laptop": {"name": "books", "source": "stdlib", "length": 128, "bounds": (64,)},
    "paper": {"name": "books", "length": 2048, "bounds": (256, 1024)},
}
_TRAINING: dict[Size, dict[str, Any]] = {
    "laptop": {
        "steps": 4,
        "batch_size": 4,
        "evaluation_sequences": 8,
        "test_sequences": 8,
    },
    "paper": {
        "steps": 1000,
        "batch_size": 32,
        "evaluation_sequences": 200,
        "test_sequences": 200,
        "checkpoint_every": 250,
        "workers": 3,
    },
}
# Windows that are read on: their lengths, and how many of a book. Ten test books have room for
# twenty to thirty of 131,072 characters, and for a hundred and more of 32,768.
_READING: dict[Size, dict[str, Any]] = {
    "laptop": {
        "lengths": (128, 2048),
        "bounds": (64, 128, 256, 512, 1024),
        "most": {"128": 2, "2048": 1},
        "documents": 8,
    },
    "paper": {"lengths": (2048, 32768, 131072), "most": {"2048": 24}},
}
# For rows that were not searched.
_RATES: dict[Size, float] = {"laptop": 5e-3, "paper": 3e-3}
_SEEDS: dict[str, dict[Size, tuple[int, ...]]] = {
    "books_deep": {"laptop": (0,), "paper": (0, 1, 2)},
    "books_deeper": {"laptop": (), "paper": (0,)},
}


def cells(experiment: str, size: Size, data: Path | None = None) -> list[Cell]:
    """All cells; at paper size they need a folder of books, and there are none without it."""
    return [
        deep_cell(experiment, size, row, seed, task)
        for task in with_books(_TASK[size], size, data)
        for seed in _SEEDS[experiment][size]
        for row in ROWS
        if row not in _LACKS.get((experiment, size), ())
    ]


def deep_cell(experiment: str, size: Size, row: str, seed: int, task: Mapping[str, Any]) -> Cell:
    """A cell of these tables, with the rates searched for its row or its kin.

    Rows are the same at both sizes, at laptop size in a narrower model. A wider model that was not
    searched itself takes half the rate that was found at half its width.
    """
    # As at paper size: S = 12 for all that have so many.
    config = sized("paper", _MODEL[experiment][size], {}, MODELS[row].settings)
    if row in _SPREAD:
        config["read_start"] = "spread"
    rows = (row, MODELS[row].kin or row)
    narrow = first_searched([f"{BOOKS_DEEP.name}/{name}" for name in rows], size, _RATES[size])[1]
    share = 1.0 if experiment == BOOKS_DEEP.name else 0.5
    unsearched = share * narrow["learning_rate"]
    search, best = first_searched([f"{experiment}/{name}" for name in rows], size, unsearched)
    config |= model_settings(best, config, own=search == f"{experiment}/{row}")
    return Cell(
        experiment=experiment,
        size=size,
        model=row,
        seed=seed,
        task={**task, "seed": seed},
        config=config,
        training={**_TRAINING[size], "learning_rate": best["learning_rate"]},
        after={"reading": _READING[size]},
        search=search,
    )


def summarise(records: Sequence[Record], size: Size) -> Summary:
    """Bits by position at every length, what rows need more than VORT, and claims about both."""
    if not records:
        return Summary([], notes=[NO_BOOKS] if size == "paper" else [])
    found = {row: of_row(members) for row, members in by_row(records).items()}
    planned = {row: of_row(members) for row, members in by_row(as_planned(records)).items()}
    lengths = sorted({length for kept in found.values() for length, _ in kept})
    trained = records[0]["task"]["length"]
    sheets = [bits_sheet(length, found, records, trained) for length in lengths]
    sheets += [
        sheet for length in lengths for sheet in [differences_sheet(length, planned)] if sheet.rows
    ]
    claims = _claims(planned, lengths, trained)
    drawn = {row: kept for row, kept in planned.items() if row not in _BESIDE}
    curves = _curves(drawn, lengths[-1:])

    def draw(path: Path) -> None:
        from vort.lab.report.figures.results import draw_reading

        title = f"Trained at {trained:,}, read to {lengths[-1]:,}"
        draw_reading(path, curves, trained, title)

    caption = (
        "Bits per character by position, mean over books and seeds, and how many more than the "
        "first row needs; lower is better. Dotted: the length of the windows in training."
    )
    figures = [Figure("reading.png", caption, draw)] if len(curves) > 1 else []
    return Summary(sheets, claims, figures, _notes(records, size), labels_of(records))


def _with_order(records: Sequence[Record], size: Size) -> Summary:
    """The summary of the narrower models, and how the rows stand in the wider ones."""
    wide = [r for r in records if r.get("experiment") == "books_deeper"]
    own = [r for r in records if r.get("experiment") != "books_deeper"]
    summary = summarise(own, size)
    if not own or not wide:
        return summary
    return replace(summary, sheets=[*summary.sheets, *_order_sheet(own, wide)])


def _order_sheet(narrow: Sequence[Record], wide: Sequence[Record]) -> list[Sheet]:
    """Rows by their bits over all positions, in models of both sizes; none that one lacks."""
    trained = narrow[0]["task"]["length"]
    bits: list[dict[str, float]] = []
    for records in (narrow, wide):
        found = {row: of_row(members) for row, members in by_row(as_planned(records)).items()}
        lengths = sorted({length for kept in found.values() for length, _ in kept})
        key = (_judged(lengths, trained), None)
        bits.append(
            {
                row: sum(r.mean()["all"] for r in kept[key].values()) / len(kept[key])
                for row, kept in found.items()
                if key in kept
            }
        )
    shared = [row for row in bits[0] if row in bits[1]]
    places = [sorted(shared, key=each.__getitem__) for each in bits]
    lines = [
        [
            label_of(row),
            *(
                cell
                for each, order in zip(bits, places, strict=True)
                for cell in (f"{each[row]:.4f}", f"{order.index(row) + 1}")
            ),
        ]
        for row in places[0]
    ]
    headings = ["model", "4 layers of 256", "place", "8 layers of 512", "place"]
    return [Sheet("Order of the rows, bits over all positions", headings, lines)] if lines else []


def _judged(lengths: Sequence[int], trained: int) -> int:
    """The length that claims are about: where positions beyond the trained one are many."""
    return next((length for length in lengths if length > trained), trained)


# Readings of a row by length and horizon, each by seed.
Row = dict[tuple[int, int | None], dict[int, Reading]]


def of_row(members: Sequence[Record]) -> Row:
    """All readings of a row's results."""
    found: Row = {}
    for record in members:
        for key, reading in readings(record).items():
            found.setdefault(key, {})[record["cell"]["seed"]] = reading
    return found


def _label(row: str, horizon: int | None, label: Callable[[str], str] = label_of) -> str:
    return label(row) + ("" if horizon is None else f", horizon {horizon:,}")


def bits_sheet(
    length: int,
    found: Mapping[str, Row],
    records: Sequence[Record],
    trained: int,
    label: Callable[[str], str] = label_of,
) -> Sheet:
    """Bits of every row by class of position in windows of a length; `label` names rows."""
    firsts = {row: members[0] for row, members in by_row(records).items()}
    names: tuple[str, ...] = ()
    lines = []
    for row, kept in found.items():
        for (each, horizon), by_seed in kept.items():
            if each != length:
                continue
            means = {seed: reading.mean() for seed, reading in by_seed.items()}
            names = next(iter(by_seed.values())).classes
            scores = [seed_interval((seed, m[name]) for seed, m in means.items()) for name in names]
            first = firsts[row]
            sizes = [f"{first['parameters']:,}", f"{first['state_numbers']:,}"]
            lines.append(
                [_label(row, horizon, label), *sizes, *(show(score, 4) for score in scores)]
            )
    what = "read as trained" if length == trained else f"trained at {trained:,}, read to {length:,}"
    title = f"Bits per character by position, {what}"
    return Sheet(title, ["model", "parameters", "state", *names], lines)


def differences_sheet(
    length: int, planned: Mapping[str, Row], label: Callable[[str], str] = label_of
) -> Sheet:
    """What rows need more than VORT, window by window; empty where VORT is not among them."""
    ours = planned.get("vort", {}).get((length, None))
    if not ours:
        return Sheet("", (), ())
    names, lines = next(iter(ours.values())).classes, []
    for row, kept in planned.items():
        for (each, horizon), rival in kept.items():
            found = differences(ours, rival) if each == length and rival is not ours else {}
            if found:
                lines.append([_label(row, horizon, label), *(shown(found[name]) for name in names)])
    title = f"Bits more than {label('vort')}, the same windows of {length:,}"
    return Sheet(title, ["model", *names], lines)


def shown(difference: Difference) -> str:
    """The mean, its interval over books, and that over seeds."""
    books, seeds = difference
    words = f"{books.mean:+.4f}"
    words += f" ± {books.half:.4f}" if books.count > 1 else ""
    return words + (f" / {seeds.half:.4f}" if seeds.count > 1 else "")


def _claims(planned: Mapping[str, Row], lengths: Sequence[int], trained: int) -> list[Claim]:
    """A lead in every class over rivals of linear time, one far out over attention, and a level."""
    length = _judged(lengths, trained)
    ours = planned.get("vort", {}).get((length, None), {})
    claims = _leads("vort", LINEAR, planned, length)
    claims += _leads("vort_first_window", ("vort", *_FEW_WINDOWS), planned, length)
    far = differences(ours, planned.get("softmax", {}).get((length, None), {}))
    if far:
        last = far[class_of(length, ours)]
        claims.append(
            Claim(
                "ours",
                f"{label_of('vort')} needs fewer bits than {label_of('softmax')} by more than "
                f".05 in the last class of positions up to {length:,}",
                f"{shown(last)} bits",
                judge_lead([last.shifted(0.05).judged]),
                rows=("vort", "softmax"),
            )
        )
    return claims + _level(planned, lengths)


def _leads(row: str, rivals: Sequence[str], planned: Mapping[str, Row], length: int) -> list[Claim]:
    """That a row needs fewer bits than each of its rivals, in windows of a length."""
    ours = planned.get(row, {}).get((length, None), {})
    claims = []
    for rival in rivals:
        found = differences(ours, planned.get(rival, {}).get((length, None), {}))
        if found:
            gains = [difference.judged for difference in found.values()]
            claims.append(
                Claim(
                    "ours",
                    f"{label_of(row)} needs fewer bits than {label_of(rival)} in every class "
                    f"of position up to {length:,}",
                    _in_words(found),
                    judge_lead(gains),
                    rows=(row, rival),
                )
            )
    return claims


def class_of(end: int, by_seed: Mapping[int, Reading]) -> str:
    """The class that ends there."""
    first = next(iter(by_seed.values()))
    return next(name for name in first.classes if name in (f"<{end}", f"-{end}"))


def _in_words(found: Mapping[str, Difference]) -> str:
    least = min((name for name in found if name != "all"), key=lambda name: found[name].books.mean)
    words = f"{shown(found['all'])} bits over all; least at {least}: {shown(found[least])}"
    count = found["all"].seeds.count
    return f"{words}; {'one seed' if count == 1 else f'{count} seeds'}"


def _level(planned: Mapping[str, Row], lengths: Sequence[int]) -> list[Claim]:
    """That bits stay where they were, however far is read."""
    claims = []
    longest = lengths[-1]
    for (length, horizon), by_seed in planned.get("vort", {}).items():
        names = next(iter(by_seed.values())).classes
        early = "-8192" if "-8192" in names else names[(len(names) - 1) // 2]
        if length != longest or early == names[-2]:
            continue
        rise = between_classes(by_seed, names[-2], early)
        within = Difference(*(type(x)(0.01 - x.mean, x.half, x.count) for x in rise))
        how = "as trained" if horizon is None else f"its horizon set to {horizon:,}"
        claims.append(
            Claim(
                "ours",
                f"{label_of('vort')}, {how}, needs at most .01 bits more at positions up to "
                f"{longest:,} than at those up to {early[1:]}",
                f"{shown(rise)} bits",
                judge_lead([within.judged]),
            )
        )
    return claims


def _curves(found: Mapping[str, Row], lengths: Sequence[int]) -> dict[str, dict[int, float]]:
    """Of each row, and of VORT at each horizon, the bits of every class by where it ends."""
    curves: dict[str, dict[int, float]] = {}
    for row, kept in found.items():
        for (length, horizon), by_seed in kept.items():
            if length not in lengths or (horizon is not None and row != "vort"):
                continue
            means = [reading.mean() for reading in by_seed.values()]
            names = next(iter(by_seed.values())).classes[:-1]
            curves[_label(row, horizon)] = {
                int(name[1:]): sum(mean[name] for mean in means) / len(means) for name in names
            }
    return curves


def _notes(records: Sequence[Record], size: Size) -> list[str]:
    sizes = sorted({record["parameters"] for record in records})
    steps = sorted({record["steps"] for record in records})
    seeds = {record["cell"]["seed"] for record in records}
    length = records[0]["task"]["length"]
    notes = [
        f"Parameters: {sizes[0]:,} to {sizes[-1]:,}. State: numbers kept for one sequence while "
        f"decoding, after {length:,} characters. A class of positions is called by where it ends.",
        f"Optimiser steps: {', '.join(f'{s:,}' for s in steps)}. {rates_note(records)}",
        "Bits are means over books, which count alike. Intervals beside bits are 95 %, Student's t "
        "over seeds. Differences are taken window by window and seed by seed; of their two "
        "intervals the first is over books (means over windows and seeds), the second over seeds "
        "(means over books). Verdicts take the wider one."
        if len(seeds) > 1
        else "One seed: intervals are 95 %, Student's t over books; they say nothing of other "
        "weights, and decide nothing.",
    ]
    if size == "laptop":
        notes.append("Laptop size: a few steps on Python's standard library, to show that it runs.")
    else:
        notes.append(NOT_PG19)
    return notes


BOOKS_DEEP = Experiment(
    name="books_deep",
    title="Deep models on books (4 layers of 256)",
    about="Four layers, next character, every row with an output gate, a short convolution and a "
    "window beside its memory; rivals with constant decays have VORT's gates and feature map. "
    "Trained on windows of 2,048, then read on test books in windows that are up to 64 times as "
    "long, each from one book. VORT is read twice, as it was trained and with its horizon set to "
    "the length of the windows; no weight is changed for it.",
    cells=partial(cells, "books_deep"),
    summarise=_with_order,
    uses=("books_deeper",),
    searchable=True,
)
BOOKS_DEEPER = Experiment(
    name="books_deeper",
    title="Deep models on books (8 layers of 512)",
    about="The same with eight layers of 512, one seed. Rows that were not searched at this size "
    "take half the rate that was found at 256. Gated DeltaNet is left to the narrower models: "
    "flash-linear-attention's kernels of it do not train on this GPU with this Triton, and in "
    "PyTorch it would take as long as half of the other rows.",
    cells=partial(cells, "books_deeper"),
    summarise=summarise,
    searchable=True,
)
