"""HTML from values: everything that comes from a file is escaped here."""

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

__all__ = ["Markup", "join", "number", "table", "tag", "text"]


class Markup(str):
    """HTML that is safe to put on a page as it stands; any other string is not."""

    __slots__ = ()


def text(value: Any) -> Markup:
    """A value as escaped text; numbers short, None as nothing. Markup stays as it is.

    >>> text("<b>"), text(0.123456), text(None)
    ('&lt;b&gt;', '0.1235', '')
    """
    if isinstance(value, Markup):
        return value
    if value is None:
        return Markup()
    return Markup(escape(number(value) if isinstance(value, (int, float)) else str(value)))


def number(value: Any) -> str:
    """A number as people write it: thousands apart, four figures, nothing for what is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def tag(name: str, *children: Any, **attributes: Any) -> Markup:
    """An element; `class_` is class, `data_x` is data-x, None leaves an attribute out.

    >>> tag("a", "<", href="#x", class_="to")
    '<a href="#x" class="to">&lt;</a>'
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>{join(children)}</{name}>")


def join(parts: Iterable[Any], between: str = "") -> Markup:
    """Parts one after the other, each escaped unless it is Markup."""
    return Markup(between.join(text(part) for part in parts))


def table(headings: Sequence[Any], rows: Sequence[Sequence[Any]], class_: str = "") -> Markup:
    """A table that scrolls by itself where it is too wide; figures stand to the right.

    Each cell knows its heading, so that a narrow screen may show rows as cards.
    """
    figures = {
        index
        for index in range(1, len(headings))
        if _all_figures([row[index] for row in rows if index < len(row) and row[index]])
    }
    head = tag(
        "tr",
        *(
            tag("th", heading, scope="col", class_="n" if index in figures else None)
            for index, heading in enumerate(headings)
        ),
    )
    body = [
        tag(
            "tr",
            *(
                tag(
                    "th" if index == 0 else "td",
                    cell,
                    scope="row" if index == 0 else None,
                    class_="n" if index in figures else None,
                    data_label=headings[index] if index < len(headings) else None,
                )
                for index, cell in enumerate(row)
            ),
        )
        for row in rows
    ]
    whole = tag("table", tag("thead", head), tag("tbody", *body), class_=class_ or None)
    return tag("div", whole, class_="scroll", tabindex="0", role="region", aria_label="Table")


_FIGURE = re.compile(r"^[+\-−±~≈<>≤≥]?\s*\.?\d[\s+\-−±.,\d%eE()\[\]/x×–*]*$")


def _all_figures(column: Sequence[Any]) -> bool:
    return bool(column) and all(map(_is_figure, column))


def _is_figure(cell: Any) -> bool:
    if isinstance(cell, (int, float)) and not isinstance(cell, bool):
        return True
    shown = re.sub(r"<[^>]*>", "", cell) if isinstance(cell, Markup) else str(cell or "")
    return bool(_FIGURE.match(shown.strip()))
