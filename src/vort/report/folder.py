"""A report folder: one Markdown page, its pictures, and the figures behind them as JSON."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vort.report.provenance import provenance
from vort.report.tables import Sheet


def write_report(
    folder: Path,
    title: str,
    sheets: Sequence[Sheet],
    pictures: Sequence[str],
    record: Mapping[str, Any],
) -> Path:
    """Write `report.md` and `results.json`, and return the page's path.

    Args:
        folder: an existing folder, which holds the pictures already.
        title: of the page.
        sheets: tables, in order.
        pictures: file names in the folder.
        record: what to keep as JSON; where it came from is added.
    """
    source = provenance()
    tables = "\n".join(sheet.to_markdown() for sheet in sheets)
    shown = "\n".join(f"![{name}]({name})\n" for name in pictures)
    foot = "\n".join(f"- {key}: `{value}`" for key, value in source.items())
    page = folder / "report.md"
    page.write_text(f"# {title}\n\n{tables}\n{shown}\n## Made by\n\n{foot}\n")
    kept = {"made_by": source, **record}
    (folder / "results.json").write_text(json.dumps(kept, indent=1) + "\n")
    return page
