"""The page of the lens: what the browser needs to recompute any retrieval weight, and no more.

A text of T tokens has T² / 2 weights for each head: too many for a page. It holds the features
instead, from which the browser computes a row or a column in milliseconds, exact up to the
precision of the codes (`vort.lab.report.lens.codes`), which is measured here and said on the page.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vort.lab.report.lens.codes import SPAN, LogCode, encode_head
from vort.lab.report.lens.view import TextView
from vort.lab.report.standalone import one_line, standalone_page, visible

__all__ = ["LensText", "lens_page"]

LIMIT_BYTES = 15_000_000
SCRIPTS = ("_memory", "_charts", "_text", "_colours", "_panel", "_selection", "")


@dataclass(frozen=True)
class LensText:
    """The text beside its tokens.

    Attributes:
        text: what was tokenized.
        offsets: characters `(start, end)` of each token.
        names: character spans of entity names.
        marks: `[T]`, the indicator the model was given, or None.
        notes: what a reader should know, such as where the text was cut.
    """

    text: str
    offsets: Sequence[tuple[int, int]]
    names: Sequence[tuple[int, int]] = ()
    marks: NDArray[np.float32] | None = None
    notes: Sequence[str] = ()


def lens_page(
    source: LensText,
    view: TextView,
    *,
    title: str,
    about: dict[str, str],
    limit_bytes: int = LIMIT_BYTES,
) -> str:
    """The page as text.

    Args:
        source: the text and its tokens.
        view: what the model did with it, from `view_text`.
        title: shown on top: the name of the text, say.
        about: facts on the model, shown in the page's foot.
        limit_bytes: features take 12 bits each, or 8 where 12 would make the page larger.
    """
    cells = cells_of(source.text, source.offsets)
    bits = 12 if _page_bytes(view, 12) <= limit_bytes else 8
    blocks: dict[str, str] = {}
    layers: list[dict[str, Any]] = []
    worst = 0.0
    for index, layer in enumerate(view.layers):
        features = LogCode(bits, signed=bool((layer.q < 0).any() or (layer.k < 0).any()))
        routes = LogCode(12, signed=False)
        for head in range(layer.q.shape[0]):
            block, error = encode_head(layer, head, features, routes)
            blocks[f"head-{index}-{head}"] = block
            worst = max(worst, error)
        layers.append(
            {
                "heads": layer.q.shape[0],
                "features": layer.q.shape[2],
                "scales": layer.write.shape[2],
                "rates": [[float(f"{rate:.8g}") for rate in row] for row in layer.rates.tolist()],
                "ordered": layer.order is not None,
                "gated": layer.gate is not None,
                "reads": layer.read is not None,
                "includeSelf": layer.include_self,
                "shares": layer.shares,
                "signed": features.signed,
            }
        )
    data = {
        "title": one_line(title),
        "notes": list(source.notes),
        "about": {name: one_line(value) for name, value in about.items()},
        "tokens": len(source.offsets),
        "cells": {
            "shown": [cell.shown for cell in cells],
            "first": [cell.first for cell in cells],
            "flags": _flags(cells, source),
        },
        "surprise": [None if np.isnan(x) else round(float(x), 2) for x in view.surprise],
        "layers": layers,
        "bits": bits,
        "span": SPAN,
        "error": float(f"{worst:.1e}"),
    }
    return standalone_page(
        "lens.html",
        title=f"{one_line(title)}: VORT lens",
        styles=["base.css", "lens.css"],
        scripts=[f"lens{part}.js" for part in SCRIPTS],
        data=data,
        blocks=blocks,
    )


def _page_bytes(view: TextView, bits: int) -> int:
    """About how large the page will be: base64 takes four letters for three bytes."""
    total = 0
    for layer in view.layers:
        heads, length, size = layer.q.shape
        scales = layer.write.shape[2] * (1 if layer.read is None else 2)
        total += heads * length * (16 + 2 * size * bits / 8 + scales * 1.5)
    return int(total * 4 / 3) + 150_000


@dataclass(frozen=True)
class Cell:
    """The smallest piece of text with tokens of its own: a character, to a byte tokenizer.

    Attributes:
        shown: what to display, see `visible`.
        start: first character of the text.
        end: character after the last.
        first: first of its tokens.
        last: last of its tokens; its bytes are all read when this one is.
    """

    shown: str
    start: int
    end: int
    first: int
    last: int


def cells_of(text: str, offsets: Sequence[tuple[int, int]]) -> list[Cell]:
    """The cells of a tokenized text, in order; every token belongs to exactly one.

    Characters that the tokenizer dropped go with the token after them, trailing ones with the last.
    Tokens without characters (special ones) stand alone as "◇".

    >>> [(cell.shown, cell.first, cell.last) for cell in cells_of("né", [(0, 1), (1, 2), (1, 2)])]
    [('n', 0, 0), ('é', 1, 2)]
    """
    spans: list[list[int]] = []  # start, end, first, last
    reached = 0
    for token, (start, end) in enumerate(offsets):
        if end > start and spans and start < spans[-1][1]:
            spans[-1][1], spans[-1][3] = max(end, spans[-1][1]), token
        elif end > start:
            spans.append([min(reached, start), end, token, token])
        else:
            spans.append([reached, reached, token, token])
        reached = max(reached, end)
    if spans:
        spans[-1][1] = max(spans[-1][1], reached)
    return [
        Cell(visible(text[start:end]) if end > start else "◇", start, end, first, last)
        for start, end, first, last in spans
    ]


def _flags(cells: Sequence[Cell], source: LensText) -> list[int]:
    """For each cell: 1 in a name, 2 where a name starts, 4 where the model was told of one."""
    named = np.zeros(len(source.text) + 1, dtype=np.int64)
    for start, end in source.names:
        named[start:end] = 1
        named[start] = 3
    marks = source.marks
    flags = []
    for cell in cells:
        flag = int(named[cell.start : max(cell.end, cell.start + 1)].max(initial=0))
        if marks is not None and marks[cell.first : cell.last + 1].any():
            flag += 4
        flags.append(flag)
    return flags
