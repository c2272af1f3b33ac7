"""Associative recall of many pairs: accuracy against the size of the state, one curve a model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vort.lab.experiments.cell import Cell, Size
from vort.lab.experiments.experiment import Experiment, Figure, Record, Summary
from vort.lab.experiments.models import BY_KEY, MODELS, sized
from vort.lab.experiments.origins import training_notes
from vort.lab.experiments.recall import has_note
from vort.lab.experiments.scores import as_planned, by_row, label_of, labels_of, row_of
from vort.lab.report.tables import Sheet
from vort.lab.training.metrics import interval
from vort.lab.verdicts import Claim, judge_lead

__all__ = ["MQAR_TABLE"]

_MODEL: dict[Size, dict[str, Any]] = {
    "laptop": {**BY_KEY, "num_hidden_layers": 1, "head_dim": 16, "num_scales": 4, "horizon": 64},
    "paper": {**BY_KEY, "num_hidden_layers": 2, "head_dim": 64, "num_scales": 6, "horizon": 1024},
}
_TASK: dict[Size, dict[str, Any]] = {
    "laptop": {
        "name": "mqar",
        "length": 64,
        "vocabulary": 64,
        "mixed": ((64, 4), (64, 8), (64, 16)),
        "train_sequences": None,
        "validation_sequences": 60,
        "test_sequences": 120,
    },
    "paper": {
        "name": "mqar",
        "length": 1024,
        "vocabulary": 8192,
        "mixed": ((64, 4), (128, 8), (256, 16), (512, 64), (1024, 256)),
        # Short ones take the time of short ones.
        "apart": 64,
        "train_sequences": None,
        "validation_sequences": 100,
        "test_sequences": 500,
    },
}
_WIDTHS: dict[Size, tuple[int, ...]] = {"laptop": (32, 64), "paper": (64, 128, 256, 512)}
# The best on validation data counts. The middle ones come first: minutes may not do for all.
_RATES: dict[Size, tuple[float, ...]] = {"laptop": (5e-3,), "paper": (3e-3, 1e-2, 1e-3, 3e-4)}
_ROWS: dict[Size, tuple[str, ...]] = {
    "laptop": ("vort", "exponential_learned_gated", "mixture_rates_gated"),
    "paper": (
        *("vort", "exponential_learned_gated", "mixture_rates_gated"),
        *("gla", "gated_delta", "softmax"),
    ),
}
_TRAINING: dict[Size, dict[str, Any]] = {
    "laptop": {"steps": 200, "batch_size": 32, "evaluation_sequences": 60, "test_sequences": 0},
    "paper": {
        "steps": 1000,
        "batch_size": 64,
        "evaluation_sequences": 100,
        "test_sequences": 0,
        "checkpoint_every": 250,
        "workers": 2,
    },
}
_QUADRATIC = ("softmax",)


def _config(size: Size, model: str, width: int) -> dict[str, Any]:
    base = _MODEL[size]
    sizes = {**base, "hidden_size": width, "num_attention_heads": width // base["head_dim"]}
    config = sized(size, sizes, {}, MODELS[model].settings)
    if config.get("memory") == "mixture":
        config["num_scales"] = base["num_scales"]
    if config.get("memory") == "exponential":
        config["exponential_rate"] = None
    return config


def cells(size: Size, data: Path | None = None) -> list[Cell]:
    """Every model at every width: with the first learning rate, then with the others."""
    return [
        Cell(
            experiment="mqar",
            size=size,
            model=model,
            seed=0,
            task={**_TASK[size], "seed": 0},
            config=_config(size, model, width),
            training={**_TRAINING[size], "learning_rate": rate},
            after={"exact": {}},
            tags={"width": width, "rate": rate},
        )
        for rate in _RATES[size]
        for width in _WIDTHS[size]
        for model in _ROWS[size]
    ]


def _best(records: Sequence[Record]) -> list[Record]:
    """Of each row and width the record with the lowest bits on validation data."""
    found: dict[tuple[str, int], Record] = {}
    for record in records:
        place = row_of(record), record["cell"]["width"]
        if place not in found or _bits(record) < _bits(found[place]):
            found[place] = record
    return list(found.values())


def _bits(record: Record) -> float:
    return float(record["validation"]["all"]["bits"])


def _percent(record: Record, bucket: str) -> float:
    return 100 * float(record["exact"][bucket]["exact"])


def summarise(records: Sequence[Record], size: Size) -> Summary:
    """A table and curves over the state, the best learning rate of each model and width."""
    if not records:
        return Summary([])
    best = _best(records)
    # Of sequences as a whole nothing is said: with 256 questions none is right.
    settings = [name for name in best[0]["exact"] if name not in ("all", "sequences")]
    rows = [
        [
            label_of(row_of(record)),
            str(record["cell"]["width"]),
            f"{record['state_bytes']:,}",
            f"{record['training']['learning_rate']:g}",
            *(f"{_percent(record, name):.1f}" for name in (*settings, "all")),
        ]
        for record in sorted(best, key=lambda record: record["cell"]["width"])
    ]
    headings = ["model", "width", "state, bytes", "rate", *settings, "all"]
    sheet = Sheet("Associative recall: right (%) by pairs and length", headings, rows)
    tried = sorted({record["training"]["learning_rate"] for record in records})
    notes = [
        "Of each model and width the best on validation data of the learning rates "
        f"{', '.join(f'{rate:g}' for rate in tried)}. State: bytes that decoding keeps for a "
        f"sequence of {records[0]['task']['length']:,} tokens.",
        *_part_note(records, size),
        *training_notes(records, paper=False),
        *has_note(records),
    ]
    labels = labels_of(records)

    def draw(path: Path) -> None:
        from vort.lab.report.figures.long_context import draw_by_state

        panels = {
            f"{name.replace(' in ', ' pairs in ')} tokens": {
                label_of(row): [(r["state_bytes"], _percent(r, name)) for r in members]
                for row, members in by_row(best).items()
            }
            for name in settings[-3:]
        }
        draw_by_state(path, panels)

    caption = (
        "Right answers against bytes of state while decoding, one point a width, the best learning "
        "rate of each."
    )
    figures = [Figure("by_state.png", caption, draw)]
    partly = _in_part(records, size)
    judged = [record for record in as_planned(best) if row_of(record) not in partly]
    return Summary([sheet], _claims(judged), figures, notes, labels)


def _in_part(records: Sequence[Record], size: Size) -> list[str]:
    """Rows that lack a width, or a learning rate that another row has tried at one of its widths.

    A row whose wider models are missing would be held against wider ones of others.
    """
    tried = {
        row: {(r["cell"]["width"], r["cell"]["rate"]) for r in members}
        for row, members in by_row(as_planned(records)).items()
    }
    rates = {rate for found in tried.values() for _, rate in found}
    whole = {(width, rate) for width in _WIDTHS[size] for rate in rates}
    return [row for row, found in tried.items() if found != whole]


def _part_note(records: Sequence[Record], size: Size) -> list[str]:
    rows = _in_part(records, size)
    if not rows:
        return []
    names = ", ".join(label_of(row) for row in rows)
    return [f"Not all widths and learning rates have been run, and nothing is judged of: {names}."]


def _claims(best: Sequence[Record]) -> list[Claim]:
    """VORT against each rival in linear time, where that has no more state than it."""
    found = by_row(best)
    if "vort" not in found:
        return []
    gains: dict[str, list[float]] = {}
    for row, members in found.items():
        if row != "vort" and row not in _QUADRATIC:
            gains[row] = [gain for ours in found["vort"] for gain in _gain(ours, members)]
    known = {row: values for row, values in gains.items() if values}
    if not known:
        return []
    means = {row: sum(values) / len(values) for row, values in known.items()}
    closest = min(means, key=lambda row: means[row])
    words = ", ".join(f"{label_of(row)} {means[row]:+.1f} points" for row in known)
    return [
        Claim(
            "ours",
            "VORT recalls at least as much as every rival that trains in linear time, at equal "
            "bytes of state",
            f"VORT less the rival's best with no more state than VORT, mean over widths: {words}; "
            f"closest is {label_of(closest)}; one seed",
            judge_lead([interval([means[closest]])]),
        )
    ]


def _gain(ours: Record, rivals: Sequence[Record]) -> list[float]:
    """How much more is right than of the best rival with no more state; nothing where none has."""
    fits: list[Mapping[str, Any]] = [r for r in rivals if r["state_bytes"] <= ours["state_bytes"]]
    return [_percent(ours, "all") - max(_percent(r, "all") for r in fits)] if fits else []


MQAR_TABLE = Experiment(
    name="mqar",
    title="Associative recall against state (MQAR)",
    about="Key-value pairs, then each key once more among other tokens, where its value is asked "
    "for: 4 to 256 pairs in 64 to 1,024 tokens of a vocabulary of 8,192 (4 to 16 in 64, of 64 "
    "tokens, at laptop size), all mixed in training and scored apart. Two layers (one), at several "
    "widths, so that accuracy can be held against the bytes of state.",
    cells=cells,
    summarise=summarise,
)
