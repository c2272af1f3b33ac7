"""Write docs/results.md from the summaries under results/: what `vort reproduce` found.

python tools/make_results_page.py
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ORDER = ("pilot", "label_copy", "books", "ablations", "plasticity", "orders", "complexity")
HEAD = """# Reproducing the paper

```sh
make reproduce                                   # everything at laptop size, no GPU, no data
vort reproduce --only pilot --workers 2          # one part; finished cells are kept
vort reproduce --scale paper --data DIR          # the paper's sizes: a GPU, and DIR/books
vort report reports/laptop                       # the page again, from what is there
vort figures reports/laptop --out figures        # the paper's figures from that run
```

A table is made of cells: one task, one model, one seed. Each writes a JSON when it is done, with
settings, versions, device, state size, parameters and time; a second run does only what is
missing, and a kill at any moment loses no finished cell. `--share 0.1` trains every cell for a
tenth of its steps, `--cells PATTERN` takes some of them. Learning rates, and Exponential's decay
rate, were searched on validation data with equally many trials for every model (`vort tune`; all
trials are in `src/vort/lab/experiments/tuned.json`); books at the paper's size are the exception,
one rate served all there. Models of a table have equally many parameters. Accuracy is in percent,
intervals are 95 % (Student's t over seeds), and verdicts are computed: *exceeded* or *reproduced*
where our mean is above or within the interval (or 2 points, 0.02 bits) of the paper's figure for
the last class of lags. A difference between two models that is clear but smaller than the paper's
is *reproduced in part*. This page is written by `tools/make_results_page.py` from `results/`.
"""


def table(sheet: dict[str, Any]) -> str:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rows = [sheet["headings"], ["---"] * len(sheet["headings"]), *sheet["rows"]]
    return f"**{sheet['title']}**\n\n" + "\n".join(map(line, rows)) + "\n"


def claims(verdicts: list[dict[str, str]]) -> str:
    rows = []
    for claim in verdicts:
        erratum = f" ({claim['erratum']})" if claim["erratum"] else ""
        parts = (claim[key] for key in ("where", "states", "measured", "verdict"))
        rows.append([*parts])
        rows[-1][-1] += erratum
    headings = ["where", "the statement", "measured", "verdict"]
    return table({"title": "Claims", "headings": headings, "rows": rows})


def section(summary: dict[str, Any]) -> str:
    parts = [f"### {summary['title']}\n", summary["about"] + "\n"]
    parts += [table(sheet) for sheet in summary["sheets"]]
    if summary["verdicts"]:
        parts.append(claims(summary["verdicts"]))
    parts += [note + "\n" for note in summary["notes"]]
    parts.append(f"`{summary['command']}`; {'; '.join(summary['trained_on'])}.\n")
    return "\n".join(parts)


def main() -> None:
    pages = [HEAD]
    for scale, title in (("paper", "At the paper's size"), ("laptop", "At laptop size")):
        folder = ROOT / "results" / scale
        found = [folder / name / "summary.json" for name in ORDER]
        summaries = [json.loads(path.read_text()) for path in found if path.exists()]
        pages.append(f"## {title}\n")
        pages += [section(summary) for summary in summaries]
    (ROOT / "docs" / "results.md").write_text("\n".join(pages))


if __name__ == "__main__":
    main()
