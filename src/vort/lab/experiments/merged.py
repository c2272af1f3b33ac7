"""Memories that add up: what it costs to read documents apart, on needles and on books."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from vort.lab.experiments.books import BOOKS_TASK, books_cell
from vort.lab.experiments.cell import Cell, Size
from vort.lab.experiments.experiment import Experiment, Record, Summary
from vort.lab.experiments.scores import by_row, label_of, labels_of, seed_interval, show
from vort.lab.report.tables import Sheet
from vort.lab.training.metrics import Interval
from vort.pretrained import DEFAULT, pretrained_path

__all__ = ["MERGED"]

_BOOKS_ROWS = ("vort", "mixture_rates_gated")
_BOOKS: dict[str, Any] = {"read": 4096, "documents": (2, 8, 32), "windows": 10}
_BOOKS_LAYERS = (1, 4)
# Windows of a book that the model that comes with the package reads: on a CPU, half a minute each.
_READ_BY_PUBLISHED = 4


def cells(size: Size, data: Path | None = None) -> list[Cell]:
    """Models of books, one layer and four, and the one that comes with the package.

    Needles come from the other table's models.
    """
    if size == "laptop" or data is None:
        return []
    task = {**BOOKS_TASK[size], "source": str(data)}
    found = []
    for layers in _BOOKS_LAYERS:
        for model in _BOOKS_ROWS:
            cell = books_cell("merged", size, model, 0, task, test_sequences=0)
            found.append(
                replace(
                    cell,
                    config={**cell.config, "num_hidden_layers": layers},
                    after={"merged_bits": _BOOKS},
                    tags={"layers": layers},
                )
            )
    settings = pretrained_path(DEFAULT) / "config.json"
    published = Cell(
        experiment="merged",
        size=size,
        model=DEFAULT,
        seed=0,
        task=task,
        training={"steps": 1},
        after={"merged_bits": _BOOKS | {"windows": _READ_BY_PUBLISHED}},
        tags={"layers": json.loads(settings.read_text())["num_hidden_layers"]},
    )
    return [*found, published]


def summarise(records: Sequence[Record], size: Size) -> Summary:
    """What merging costs: needles found and bits of books, by number of documents."""
    needles = [record for record in records if "merged_needles" in record]
    books = [record for record in records if "merged_bits" in record]
    sheets = [_needles_sheet(needles)] if needles else []
    if books:
        sheets.append(_bits_sheet(books))
    labels = labels_of((*needles, *books))
    notes = [
        "Documents are read apart, none knowing of the others; their states are aged in closed "
        "form and added up, and what is asked is read after that. In one layer that is what "
        "reading in a row leaves, but for the first tokens of each document; above it is an "
        "approximation."
    ]
    return Summary(sheets, notes=notes if sheets else (), labels=labels)


def _needles_sheet(records: Sequence[Record]) -> Sheet:
    cuts = list(records[0]["merged_needles"]["merged"])
    length = records[0]["merged_needles"]["length"]
    rows = []
    for row, members in by_row(records).items():
        layers = str(members[0]["model"]["num_hidden_layers"])
        for word, share in (("answers", ("answers", "asked")), ("texts", ("whole", "sequences"))):
            found = [_share(members, cut, share) for cut in (None, *cuts)]
            rows.append([label_of(row), layers, word, *(show(x, 1) for x in found)])
    return Sheet(
        f"Four needles in {length:,} tokens, spread over documents that are read apart: right (%)",
        ["model", "layers", "of", "in a row", *(f"{cut} documents" for cut in cuts)],
        rows,
    )


def _share(members: Sequence[Record], cut: str | None, share: tuple[str, str]) -> Interval | None:
    found = [
        (m["cell"]["seed"], m["merged_needles"]["row" if cut is None else "merged"])
        for m in members
    ]
    values = [(seed, x if cut is None else x[cut]) for seed, x in found]
    return seed_interval((seed, 100 * x[share[0]] / x[share[1]]) for seed, x in values)


def _bits_sheet(records: Sequence[Record]) -> Sheet:
    first: Mapping[str, Any] = records[0]["merged_bits"]
    cuts = list(first["merged"])
    rows = []
    for record in records:
        bits = record["merged_bits"]
        row, layers = bits["row"], str(record["cell"]["layers"])
        name = f"{label_of(record['cell']['model'])}, {len(row)} windows"
        rows.append([name, layers, f"{fmean(row):.4f}"])
        for other in (bits["nothing"], *(bits["merged"][cut] for cut in cuts)):
            costs = (a - b for a, b in zip(other, row, strict=True))
            # what is said of seeds holds of books: windows of one count once
            rows[-1].append(show(seed_interval(zip(bits["books"], costs, strict=True)), 4))
    return Sheet(
        f"Books: bits a character of the {first['scored']:,} after {first['read']:,}; and what it "
        "costs to have read nothing, or documents apart (intervals over books)",
        ["model", "layers", "in a row", "nothing", *(f"{cut} documents" for cut in cuts)],
        rows,
    )


MERGED = Experiment(
    name="merged",
    title="Memories that add up",
    about="What it costs to read documents apart and to add up their states, against reading them "
    "in a row: needles spread over 2, 8 and 32 documents, by the models of the needle map; and "
    "bits of books after a text that was cut into as many.",
    cells=cells,
    summarise=summarise,
    uses=("needles",),
)
