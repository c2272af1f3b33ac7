"""Table pg19: next-character prediction by position in the window."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vort.lab.experiments.cell import Cell, Size
from vort.lab.experiments.experiment import Experiment, Figure, Record, Summary
from vort.lab.experiments.models import MODELS, SLOW, sized
from vort.lab.experiments.origins import training_notes
from vort.lab.experiments.scores import (
    PaperTable,
    as_planned,
    by_row,
    gain_in_words,
    label_of,
    labels_of,
    margin,
    score_sheet,
    verdict_on_gain,
)
from vort.lab.experiments.search import first_searched, model_settings
from vort.lab.verdicts import Claim, judge_lead

__all__ = ["BOOKS", "BOOKS_TASK", "NOT_PG19", "NO_BOOKS", "books_cell", "with_books"]

# What tables on books say of themselves.
NO_BOOKS = (
    "No results: --scale paper needs --data, a folder of books: .txt files, or train/ with them."
)
# Folders of other tasks beside books/.
_OTHER_DATA = ("scan", "babi", "litbank")
NOT_PG19 = "Not the official PG-19 split: bits are not comparable with published ones."

PAPER = PaperTable(
    label="pg19",
    score="bits",
    rows={
        "Power-Law (ours)": (1.84, 1.71, 1.62, 1.56),
        "Exponential": (1.85, 1.74, 1.69, 1.68),
        "Mixture-5": (1.84, 1.73, 1.67, 1.63),
    },
    tolerance=0.02,
)

_MODEL: dict[Size, dict[str, Any]] = {
    "laptop": {
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "sliding_window": 32,
        "num_scales": 8,
        "horizon": 1024,
        "tie_word_embeddings": False,
    },
    "paper": {
        "num_hidden_layers": 1,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "sliding_window": 128,
        "num_scales": 12,
        "horizon": 8192,
        "tie_word_embeddings": False,
    },
}
BOOKS_TASK: dict[Size, dict[str, Any]] = {
    "laptop": {"name": "books", "source": "stdlib", "length": 1024, "bounds": (64, 256, 512)},
    "paper": {"name": "books", "length": 8192},
}
_TRAINING: dict[Size, dict[str, Any]] = {
    "laptop": {
        "steps": 60,
        "batch_size": 8,
        "evaluation_sequences": 16,
        "test_sequences": 64,
    },
    "paper": {
        "steps": 1200,
        "batch_size": 8,
        "evaluation_sequences": 50,
        "checkpoint_every": 400,
        "workers": 3,
    },
}
# For models that were not searched.
_RATES: dict[Size, float] = {"laptop": 5e-3, "paper": 2e-3}
# The paper's K = 8 banks of S = 10 scales; 33 states at laptop size.
_BANKS: dict[Size, dict[str, Any]] = {
    "laptop": {"num_banks": 5, "num_scales": 8},
    "paper": {"num_banks": 8, "num_scales": 10},
}
_MODELS: dict[Size, tuple[str, ...]] = {
    "laptop": ("vort", "power_law", "mixture", "exponential", "none"),
    "paper": ("vort", "power_law", "mixture", "exponential", "none", *SLOW),
}
_SEEDS: dict[Size, tuple[int, ...]] = {"laptop": (0,), "paper": (0, 1, 2)}


def cells(size: Size, data: Path | None = None) -> list[Cell]:
    """All cells; at paper size they need a folder of books, and there are none without it."""
    return [
        books_cell("books", size, model, seed, task)
        for task in with_books(BOOKS_TASK[size], size, data)
        for slow in (False, True)
        for seed in _SEEDS[size]
        for model in _MODELS[size]
        if (model in SLOW) == slow
    ]


def with_books(task: Mapping[str, Any], size: Size, data: Path | None) -> list[dict[str, Any]]:
    """The task with the texts it is about; none where it needs a folder of them and has none.

    A folder that is not there is taken at its word: results that are there already name one.
    """
    if size != "paper":
        return [dict(task)]
    if data is None or (data.is_dir() and not _has_texts(data)):
        return []
    return [{**task, "source": str(data)}]


def _has_texts(folder: Path) -> bool:
    """Whether there are books; texts of other tasks that lie in the same folder are none."""
    if (folder / "train").is_dir():
        return True
    found = (path.relative_to(folder).parts[0] for path in folder.rglob("*.txt"))
    return any(name not in _OTHER_DATA for name in found)


def books_cell(
    experiment: str,
    size: Size,
    model: str,
    seed: int,
    task: Mapping[str, Any],
    **training: Any,
) -> Cell:
    """A cell of a table on text: the row's settings at this size, with its searched rates.

    Args:
        experiment: its table.
        size: "laptop" or "paper".
        model: its row; one that was not searched takes the rates of its kin.
        seed: of model and data.
        task: name and settings.
        **training: what differs from the training of the table of books.
    """
    config = sized(size, _MODEL[size], _BANKS[size], MODELS[model].settings)
    if model == "exponential":
        # A rate for each head, learned: on text the stronger form of this rival.
        config |= {"learn_rates": True}
    own, kin = f"books/{model}", f"books/{MODELS[model].kin or model}"
    search, best = first_searched((own, kin), size, _RATES[size])
    config |= model_settings(best, config, own=search == own)
    return Cell(
        experiment=experiment,
        size=size,
        model=model,
        seed=seed,
        task={**task, "seed": seed},
        config=config,
        training={**_TRAINING[size], "learning_rate": best["learning_rate"], **training},
        after={"orders": {}} if model in ("vort", "vort_entity") else {},
        search=search,
    )


def summarise(records: Sequence[Record], size: Size) -> Summary:
    """Table, claims and bits by position."""
    if not records:
        return Summary([], notes=[NO_BOOKS])
    buckets = [name for name in records[0]["test"] if name != "all"]
    sheet = score_sheet(
        "Books: bits per character by position in the window", records, buckets, PAPER
    )
    found, last = by_row(as_planned(records)), buckets[-1]
    claims = [
        claim
        for rival in ("exponential", "mixture", "none", "gla", "vort_paper")
        for ours in ("power_law", "vort")
        if rival in found and ours in found
        for claim in _claim(found, ours, rival, last)
    ]
    notes = training_notes(records)
    if size == "laptop":
        notes.append(
            "Laptop size: source code of Python's standard library in windows of 1,024 characters; "
            "its bits are not those of books."
        )
    else:
        notes.append(NOT_PG19)

    def draw(path: Path) -> None:
        from vort.lab.report.figures.results import draw_by_position

        # Changed settings may have other classes of position.
        alike = [record for record in records if set(buckets) <= set(record["test"])]
        draw_by_position(path, {label_of(k): v for k, v in by_row(alike).items()}, buckets)

    caption = "Bits per character by position in the window, mean over seeds; lower is better."
    figures = [Figure("by_position.png", caption, draw)]
    return Summary([sheet], claims, figures, notes, labels_of(records))


def _claim(found: Mapping[str, list[Record]], ours: str, rival: str, last: str) -> list[Claim]:
    gain = margin(found[ours], found[rival], last, PAPER)
    if gain is None:
        return []
    rows = [PAPER.rows.get(MODELS[name].paper_row) for name in (ours, rival)]
    measured = gain_in_words(found[ours], found[rival], last, PAPER)
    where = f"than {label_of(rival)} in the last class of positions"
    if ours == "power_law" and rows[0] is not None and rows[1] is not None:
        paper = rows[1][-1] - rows[0][-1]
        states = f"{label_of(ours)} needs {paper:.2f} bits less {where}"
        return [Claim("table pg19", states, measured, verdict_on_gain(paper, gain, PAPER))]
    states = f"{label_of(ours)} needs fewer bits {where}"
    return [Claim("ours", states, measured, judge_lead([gain]))]


BOOKS = Experiment(
    name="books",
    title="Language modelling (table pg19)",
    about="One layer, next character, trained on one set of texts and tested on others; bits by "
    "position in the window. Local attention sits beside every memory, so that memories are "
    "compared on what lies beyond the window.",
    cells=cells,
    summarise=summarise,
    searchable=True,
)
