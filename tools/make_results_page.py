"""Write docs/results.md and docs/experiments.md from the summaries under results/.

The first is what `vort reproduce` found, the second what became of ideas that were tried on
validation data alone.

python tools/make_results_page.py
"""

import inspect
import json
import re
from pathlib import Path
from typing import Any

from vort.lab.experiments import EXPERIMENTS
from vort.lab.experiments.books_research import BOOKS_RESEARCH, ideas_sheet, outcome
from vort.lab.experiments.experiment import claims_sheet
from vort.lab.report.tables import Sheet
from vort.lab.verdicts import Claim, rules

ROOT = Path(__file__).parents[1]
HEAD = """# Reproducing the paper

```sh
make reproduce                                   # everything at laptop size, no GPU, no data
vort reproduce --only pilot --workers 2          # one part; finished cells are kept
vort reproduce --scale paper --data DIR          # the paper's sizes: a GPU, and DIR/books
vort reproduce --scale paper --minutes 25        # as much as fits; the same command goes on
vort reproduce --set model.num_scales=4          # other settings, in rows of their own
vort reproduce --scale paper --no-run --out results/paper   # the tables below, from their cells
vort report reports/laptop                       # the page again, from what is there
vort figures reports/laptop --out figures        # the paper's figures from that run
```

A table is made of cells: one task, one model, one seed. Each writes a JSON when it is done, with
settings, commit, versions, device, command, state size, parameters and time; a second run does
only what is missing, and a kill at any moment loses no finished cell. Where cells of a table were
made by different versions of the kernels or the model, a table under it says which commit made
which; rows of other settings than are planned now are marked ‡. A result is replaced with a reason
only (`--reason`): what stood there moves to `history/` beside `cells/` and is listed under its
table. `--share 0.1` trains every cell for a tenth of its steps, `--cells PATTERN` takes some of
them, and `--set training.learning_rate=1e-3` (or any other setting of the task, the model or the
training) makes cells and rows of their own.

Learning rates and decays are searched in stages (`vort tune`): seven short trials, the best three
at a quarter of a run, the best two at full length; where the best lies at the edge of what a row
has tried, the value beyond is tried too, and at full length a rate has both its neighbours tried.
The lowest bits on validation data of seed 100 win, or the lowest mean over seeds from 100 on where
a note names several; no table uses them. All trials, and those of earlier searches, are in
`src/vort/lab/experiments/trials.jsonl`, which only grows. So it was done, for every row, in the
paper's tables: pilot, label copy, pg19. Elsewhere the search is not complete, or there was none,
and the notes of a table say so row by row: whose rates come from short trials alone, how many there
were, and whose lie at the edge of what was tried. Ideas for VORT itself were tried beside these
searches ([on validation books](experiments.md), and some on the pilot); rivals had no such trials,
and got of what came out what they can have.

Models of a table have equally many parameters. Accuracy is in percent; intervals are 95 %,
Student's t over seeds, and differences between models are taken seed by seed. Results of one seed
under several conditions (beta) are averaged within the seed. Where there is one seed, a difference
may have an interval over its test sequences, which both models were asked alike; it says nothing
of other weights, and decides nothing.

## How claims are judged

"""
TAIL = """
The tolerance is 2 points, or 0.02 bits, unless the claim names one. Mathematical claims, which
have no seeds, hold as printed (*reproduced*), once corrected as [errata](errata.md) say, or not.
This page is written by `tools/make_results_page.py` from the summaries under `results/`, and a
test makes both again from the cells.
"""

IDEAS_HEAD = """# Ideas, kept and dropped

What might make VORT better on text, one change at a time, beside VORT as the table of deep models
on books has it: four layers of 256, four heads, S = 12, a window of 128, an output gate. Every
idea has a prediction, written into `lab/experiments/books_research.py` before it was run, and is
judged on validation books alone: the test books stay unread until a table needs them. What a page
of such trials finds is worth a trial with searched rates, no more: a window in the first layer
only, kept below, cost .016 bits in the [table](results.md) (*a window in every fourth layer*: four
layers, so the first) as long as its heads all read alike at first, at another rate; begun as VORT's
own are it costs nothing that can be told apart up to 32,768 characters, and some beyond.

```sh
vort reproduce --scale paper --only books_research --data DIR    # a GPU, and DIR/books
```

"""
IDEAS_TAIL = """
Not tried: erasing writes in VORT's slow scales, which no kernel of ours has (a layer of Gated
DeltaNet in turn with VORT stands in for them); projections of their own for memory and window,
since the learned maps of queries and keys are projections of the memory's own, head by head.

This page is written by `tools/make_results_page.py`.
"""


def section(summary: dict[str, Any]) -> str:
    """A summary in Markdown: what was done, tables, claims, notes, where it came from."""
    sheets = [Sheet(**sheet) for sheet in summary["sheets"]]
    if summary["verdicts"]:
        sheets.append(claims_sheet([Claim(**claim) for claim in summary["verdicts"]]))
    # A title in bold: headings of this level would fill the page's contents.
    tables = [re.sub("^## (.*)", r"**\1**", sheet.to_markdown()) for sheet in sheets]
    made_by = summary.get("trained_on") or [_machine(summary["made_by"])]
    origin = f"`{summary['command']}`; {'; '.join(made_by)}.\n"
    notes = [note + "\n" for note in summary["notes"]]
    head = [f"### {summary['title']}\n", summary["about"] + "\n"]
    return "\n".join([*head, *tables, *notes, origin])


def _machine(made_by: dict[str, str]) -> str:
    return f"{made_by['device']}, torch {made_by['torch']}"


def page(results: Path) -> str:
    """The whole page, from the summaries in a folder of results."""
    pages = [HEAD + "".join(f"- {rule}\n" for rule in rules()) + TAIL]
    for size, title in (("paper", "At the paper's size"), ("laptop", "At laptop size")):
        tables = [name for name in EXPERIMENTS if name != BOOKS_RESEARCH.name]
        found = [results / size / name / "summary.json" for name in tables]
        summaries = [json.loads(path.read_text()) for path in found if path.exists()]
        pages.append(f"## {title}\n")
        pages += [section(summary) for summary in summaries]
    return "\n".join(pages)


def ideas_page(results: Path) -> str:
    """The page of ideas: what came of them, or that they were not yet run."""
    rule = inspect.getdoc(outcome) or ""
    head = IDEAS_HEAD + rule.split("\n\n")[1] + "\n"
    kept = results / "paper" / BOOKS_RESEARCH.name / "summary.json"
    if kept.exists():
        return "\n".join([head, section(json.loads(kept.read_text()))]) + IDEAS_TAIL
    table = re.sub("^## (.*)", r"**\1**", ideas_sheet([]).to_markdown())
    return "\n".join([head, f"### {BOOKS_RESEARCH.title}\n", table]) + IDEAS_TAIL


def main() -> None:
    (ROOT / "docs" / "results.md").write_text(page(ROOT / "results"))
    (ROOT / "docs" / "experiments.md").write_text(ideas_page(ROOT / "results"))


if __name__ == "__main__":
    main()
