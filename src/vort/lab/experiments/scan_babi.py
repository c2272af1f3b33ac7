"""SCAN and bAbI: programs for commands, and answers about stories, from a user's files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vort.lab.experiments.cell import Cell, Size
from vort.lab.experiments.experiment import Experiment, Record, Summary
from vort.lab.experiments.models import MODELS, sized
from vort.lab.experiments.origins import training_notes
from vort.lab.experiments.scores import by_row, label_of, seed_interval, show
from vort.lab.report.tables import Sheet
from vort.lab.training.metrics import Interval

__all__ = ["BABI_TABLE", "SCAN_TABLE"]

_ROWS = ("vort", "softmax", "exponential_learned_gated", "gla")
_SEEDS = (0, 1, 2)
_MCD = ("mcd1", "mcd2", "mcd3")
_PARTS = ("simple", "length", "addprim_jump", *_MCD)
_MODEL: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_scales": 8,
    "use_entropy": False,
    "tie_word_embeddings": False,
}
# Windows are short, lest they be memory enough.
_SIZES: dict[str, dict[str, Any]] = {
    "scan": {**_MODEL, "sliding_window": 8, "horizon": 64},
    "babi": {**_MODEL, "sliding_window": 16, "horizon": 2048},
}
_TRAINING: dict[str, dict[str, Any]] = {
    "scan": {"steps": 3000, "batch_size": 128, "learning_rate": 1e-3, "evaluation_batch_size": 256},
    "babi": {"steps": 3000, "batch_size": 16, "learning_rate": 1e-3, "evaluation_batch_size": 32},
}
_ALIKE = {
    "evaluation_sequences": 200,
    "test_sequences": 0,
    "checkpoint_every": 1000,
    "workers": 2,
}
FAILED = 5.0

# Errors in percent by task, all tasks learned together from 10,000 questions each; means of runs.
PUBLISHED: dict[str, tuple[float, ...]] = {
    "LSTM": (
        *(28.4, 56.0, 51.3, 0.8, 3.2, 15.2, 16.4, 17.7, 15.4, 28.7),
        *(12.2, 5.4, 7.2, 55.9, 47.0, 53.3, 34.8, 5.0, 90.9, 1.3),
    ),
    "DNC": (
        *(9.0, 39.2, 39.6, 0.4, 1.5, 6.9, 9.8, 5.5, 7.7, 9.6),
        *(3.3, 5.0, 3.1, 11.0, 27.2, 53.6, 32.4, 4.2, 64.6, 0.0),
    ),
    "EntNet": (
        *(0.0, 15.3, 29.3, 0.1, 0.4, 0.6, 1.8, 1.5, 0.0, 0.1),
        *(0.2, 0.0, 0.0, 7.3, 3.6, 53.3, 8.8, 1.3, 70.4, 0.0),
    ),
    "SDNC": (
        *(0.0, 7.1, 9.4, 0.1, 0.9, 0.1, 1.6, 0.5, 0.0, 0.3),
        *(0.0, 0.2, 0.1, 5.6, 3.6, 53.0, 12.4, 1.6, 30.8, 0.0),
    ),
    "Universal Transformer, halting": (
        *(0.0, 1.7, 4.6, 0.2, 0.8, 0.1, 1.1, 0.5, 0.0, 0.5),
        *(0.1, 0.4, 0.3, 1.3, 1.6, 0.9, 1.4, 0.7, 6.1, 0.0),
    ),
}
# Means over tasks and tasks failed, as published: of runs, not of the means above.
PUBLISHED_MEANS = {
    "LSTM": ("27.3", "17.1"),
    "DNC": ("16.7", "11.2"),
    "EntNet": ("9.7", "5.0"),
    "SDNC": ("6.4", "4.1"),
    "Universal Transformer, halting": ("1.1", "–"),
    "Transformer, best run": ("22.1", "12"),
    "Universal Transformer, best run": ("0.5", "0"),
}
# What is not in these tables was not found in a source: MemN2N with 10,000 questions and all tasks
# together, and SCAN's MCD splits one by one.
SOURCES = (
    "Published figures, all tasks learned together from 10,000 questions each; sizes and training "
    "differ from ours and from each other. LSTM and DNC, means of runs: Graves et al. 2016, "
    '"Hybrid computing using a neural network with dynamic external memory", extended data table '
    "1, as given by github.com/willsq/tf-DNC (LSTM) and by Franke et al. 2018 (DNC). EntNet "
    "(Henaff et al. 2017) and SDNC (Rae et al. 2016), means of runs: as given by Franke et al. "
    '2018, "Robust and Scalable Differentiable Neural Computer for Question Answering" (arXiv '
    "1807.02658; table of bAbI at github.com/JoergFranke/ADNC). Transformer and Universal "
    'Transformer, which see a story as sentences: Dehghani et al. 2019, "Universal Transformers" '
    "(arXiv 1807.03819), table 1; with dynamic halting by task, appendix E, mean of ten runs, "
    "whose best (0.29) is what table 1 shows for it. What is given by task is shown by task."
)
# Programs that are right whole, in percent.
PUBLISHED_SCAN: dict[str, dict[str, float]] = {
    "recurrent networks, the best for each split (Lake & Baroni 2018)": {
        "simple": 99.8,
        "length": 20.8,
        "addprim_jump": 1.2,
    },
    "LSTM, the best over all splits (Lake & Baroni 2018)": {
        "simple": 99.7,
        "length": 13.8,
        "addprim_jump": 0.08,
    },
    "LSTM with attention (Keysers et al. 2020)": {"mcd": 6.1},
    "Transformer (Keysers et al. 2020)": {"mcd": 1.1},
    "Universal Transformer (Keysers et al. 2020)": {"mcd": 1.2},
}
SCAN_SOURCE = (
    "Published figures, means of five runs; sizes and training differ from ours, and all read a "
    'command with one network and write with another. Lake & Baroni 2018, "Generalization '
    'without Systematicity" (arXiv 1711.00350), experiments 1 to 3: the best for each split is an '
    "LSTM, a GRU with attention and an LSTM with attention, the best over all splits an LSTM of "
    'two layers of 200 (with "turn left" known alone, which is none of our splits, 90.3 and 90.0). '
    'Keysers et al. 2020, "Measuring Compositional Generalization" (arXiv 1912.09713), table 4: '
    "the mean over the three MCD splits, which are not given one by one."
)


def _folder(data: Path | None, name: str) -> str | None:
    """Where a user's folder of texts has this task's files: in it, or beside the books.

    A folder that does not exist is one of no user: cells are only to be named.
    """
    if data is None:
        return None
    for place in (data / name, data.parent / name):
        if place.is_dir():
            return str(place)
    return None if data.is_dir() else str(data.parent / name)


def _cells(
    name: str, size: Size, data: Path | None, settings: Sequence[dict[str, Any]]
) -> list[Cell]:
    """Cells at paper size, where there are files; the first seed of all before the second."""
    source = _folder(data, name)
    if size == "laptop" or source is None:
        return []
    found = []
    for seed in _SEEDS:
        for setting in settings:
            for model in _ROWS:
                config = sized(size, _SIZES[name], {}, MODELS[model].settings)
                if config.get("memory") == "exponential":
                    config["exponential_rate"] = None
                found.append(
                    Cell(
                        experiment=name,
                        size=size,
                        model=model,
                        seed=seed,
                        task={"name": name, "source": source, **setting, "seed": seed},
                        config=config,
                        training={**_TRAINING[name], **_ALIKE},
                        after={"exact": {}},
                        tags=setting,
                    )
                )
    return found


def scan_cells(size: Size, data: Path | None = None) -> list[Cell]:
    """Six splits."""
    return _cells("scan", size, data, [{"part": part} for part in _PARTS])


def babi_cells(size: Size, data: Path | None = None) -> list[Cell]:
    """All twenty tasks together."""
    return _cells("babi", size, data, [{}])


def _labels(records: Sequence[Record]) -> dict[str, str]:
    return {record["cell"]["model"]: label_of(record["cell"]["model"]) for record in records}


def summarise_scan(records: Sequence[Record], size: Size) -> Summary:
    """Commands whose program is right whole, by split."""
    if not records:
        return Summary([], notes=["No results: --scale paper needs --data, with a folder scan/."])
    rows = []
    for row, members in by_row(records).items():
        shown = [show(_right(members, [part]), 1) for part in _PARTS]
        mean = show(_right(members, _MCD), 1)
        rows.append([label_of(row), f"{members[0]['state_numbers']:,}", *shown, mean])
    for name, found in PUBLISHED_SCAN.items():
        shown = [f"{found[part]:.1f}" if part in found else "–" for part in (*_PARTS, "mcd")]
        rows.append([name, "–", *shown])
    title = "SCAN: commands whose actions are all right, with their end (%)"
    sheet = Sheet(title, ["model", "state", *_PARTS, "mean of MCD"], rows)
    notes = [
        "A program counts if each of its tokens is the likeliest after those before it: what a "
        "model that writes by itself would write.",
        SCAN_SOURCE,
        *training_notes(records, paper=False),
    ]
    return Summary([sheet], notes=notes, labels=_labels(records))


def _right(members: Sequence[Record], parts: Sequence[str]) -> Interval | None:
    """Mean over splits, of the seeds that have them all."""
    found = {(m["cell"]["seed"], m["cell"]["part"]): m["exact"]["all"]["exact"] for m in members}
    seeds = {seed for seed, _ in found}
    whole = sorted(seed for seed in seeds if all((seed, part) in found for part in parts))
    return seed_interval((seed, 100 * found[seed, part]) for seed in whole for part in parts)


def summarise_babi(records: Sequence[Record], size: Size) -> Summary:
    """Errors by task, ours beside published ones."""
    if not records:
        return Summary([], notes=["No results: --scale paper needs --data, with a folder babi/."])
    found = by_row(records)
    errors = {
        row: [
            {
                task: 100 - 100 * score["exact"]
                for task, score in member["exact"].items()
                if task.startswith("qa")
            }
            for member in members
        ]
        for row, members in found.items()
    }
    seeds = {row: [m["cell"]["seed"] for m in members] for row, members in found.items()}

    def over(row: str, values: Sequence[float]) -> str:
        return show(seed_interval(zip(seeds[row], values, strict=True)), 1)

    tasks = list(next(iter(errors.values()))[0])
    rows = [
        [task, *(over(row, [e[task] for e in every]) for row, every in errors.items())]
        + [_published(name, int(task[2:]) - 1) for name in PUBLISHED_MEANS]
        for task in tasks
    ]
    for place, (words, count) in enumerate((("mean", _mean), ("failed (> 5 %)", _failed))):
        ours = [over(row, [count(e) for e in every]) for row, every in errors.items()]
        rows.append([words, *ours, *(means[place] for means in PUBLISHED_MEANS.values())])
    headings = ["task", *(label_of(row) for row in found), *PUBLISHED_MEANS]
    sheet = Sheet("bAbI, twenty tasks together: errors (%)", headings, rows)
    lacking = records[0]["task"].get("lacking") or []
    notes = [SOURCES, *training_notes(records, paper=False)]
    if lacking:
        named = ", ".join(f"qa{task}" for task in lacking)
        notes.append(f"Trained on the smaller release, 1,000 questions: {named}.")
    return Summary([sheet], notes=notes, labels=_labels(records))


def _published(name: str, task: int) -> str:
    return f"{PUBLISHED[name][task]:.1f}" if name in PUBLISHED else "–"


def _mean(errors: dict[str, float]) -> float:
    return sum(errors.values()) / len(errors)


def _failed(errors: dict[str, float]) -> float:
    return float(sum(error > FAILED for error in errors.values()))


SCAN_TABLE = Experiment(
    name="scan",
    title="SCAN",
    about='Commands like "jump around left twice" to sequences of actions, as next-token '
    "prediction: a random split, longer programs than in training, a verb known alone, and three "
    "splits of unlike compounds (MCD).",
    cells=scan_cells,
    summarise=summarise_scan,
)
BABI_TABLE = Experiment(
    name="babi",
    title="bAbI",
    about="Twenty tasks of questions about stories, one model for all, 10,000 questions each; an "
    "answer stands right after its question and is asked for there.",
    cells=babi_cells,
    summarise=summarise_babi,
)
