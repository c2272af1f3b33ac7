"""Write docs/results.md from the summaries under results/: what `vort reproduce` found.

python tools/make_results_page.py
"""

import json
import re
from pathlib import Path
from typing import Any

from vort.lab.experiments import EXPERIMENTS
from vort.lab.experiments.experiment import claims_sheet
from vort.lab.report.tables import Sheet
from vort.lab.verdicts import Claim

ROOT = Path(__file__).parents[1]
HEAD = """# Reproducing the paper

```sh
make reproduce                                   # everything at laptop size, no GPU, no data
vort reproduce --only pilot --workers 2          # one part; finished cells are kept
vort reproduce --scale paper --data DIR          # the paper's sizes: a GPU, and DIR/books
vort reproduce --set model.num_scales=4           # other settings, in rows of their own
vort report reports/laptop                       # the page again, from what is there
vort figures reports/laptop --out figures        # the paper's figures from that run
```

A table is made of cells: one task, one model, one seed. Each writes a JSON when it is done, with
settings, versions, device, state size, parameters and time; a second run does only what is
missing, and a kill at any moment loses no finished cell. `--share 0.1` trains every cell for a
tenth of its steps, `--cells PATTERN` takes some of them, and `--set training.learning_rate=1e-3`
(or any other setting of the task, the model or the training) makes cells and rows of their own,
beside the others. Learning rates, and Exponential's decay rate, were searched on validation data
with equally many trials for every model (`vort tune`; all trials are in
`src/vort/lab/experiments/search.json`); books, and label copy at the paper's size, are the
exception: one rate served all there. Models of a table have equally many parameters. Accuracy is in
percent, intervals are 95 % (Student's t over seeds), and verdicts are computed: *exceeded* or
*reproduced* where our mean is above or within the interval (or 2 points, 0.02 bits) of the paper's
figure for the last class of lags. A difference between two models that is clear but smaller than
the paper's is *reproduced in part*. This page is written by `tools/make_results_page.py` from
`results/`.
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


def main() -> None:
    pages = [HEAD]
    for size, title in (("paper", "At the paper's size"), ("laptop", "At laptop size")):
        folder = ROOT / "results" / size
        found = [folder / name / "summary.json" for name in EXPERIMENTS]
        summaries = [json.loads(path.read_text()) for path in found if path.exists()]
        pages.append(f"## {title}\n")
        pages += [section(summary) for summary in summaries]
    (ROOT / "docs" / "results.md").write_text("\n".join(pages))


if __name__ == "__main__":
    main()
