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

from vort.lab.report.lens.codes import (
    SPAN,
    LogCode,
    LogRows,
    encode_head,
    levels_of,
    logits_of,
    spread_of,
)
from vort.lab.report.lens.view import LayerView, TextView
from vort.lab.report.standalone import one_line, standalone_page, visible
from vort.threads import one_thread

__all__ = ["LensText", "lens_page"]

LIMIT_BYTES = 8_000_000
# Steps of logits, the finest first; a weight is off by less than a fifth of one.
STEPS = tuple(float(f"{0.005 * 2 ** (n / 8):.3g}") for n in range(57))
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


@one_thread
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
        limit_bytes: logits have steps as fine as leave the page about as large as this; other
            features take 12 bits each, or 8 where 12 would make the page larger.
    """
    cells = cells_of(source.text, source.offsets)
    turned = [_has_logits(layer) for layer in view.layers]
    bits = 12 if _page_bytes(view, 12) <= limit_bytes else 8
    step = _step(view, turned, limit_bytes)
    blocks: dict[str, str] = {}
    layers: list[dict[str, Any]] = []
    worst, usual = 0.0, 0.0
    for index, layer in enumerate(view.layers):
        features = LogCode(bits, signed=bool((layer.q < 0).any() or (layer.k < 0).any()))
        each = []
        for head in range(layer.q.shape[0]):
            found = encode_head(layer, head, features, step if turned[index] else None)
            blocks[f"head-{index}-{head}"] = found.text
            each.append(found.about)
            worst, usual = max(worst, found.worst), max(usual, found.usual)
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
                "turned": turned[index],
                "levels": levels_of(step if turned[index] else None),
                "each": each,
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
        "step": step,
        "error": float(f"{worst:.1e}"),
        "usual": float(f"{usual:.1e}"),
    }
    return standalone_page(
        "lens.html",
        title=f"{one_line(title)}: VORT lens",
        styles=["base.css", "lens.css"],
        scripts=[f"lens{part}.js" for part in SCRIPTS],
        data=data,
        blocks=blocks,
    )


def _has_logits(layer: LayerView) -> bool:
    """Whether features are softmaxes, and what is read of scales averages to one."""
    if layer.read is not None and not np.allclose(layer.read.mean(-1), 1, atol=1e-3):
        return False
    return all(logits_of(x) is not None for rows in (layer.q, layer.k) for x in rows)


def _step(view: TextView, turned: Sequence[bool], limit_bytes: int) -> float:
    """The finest step of logits with which the page will be about as large as it may."""
    length, heads = len(view.surprise), 0
    spreads: list[NDArray[np.float64]] = []
    others: list[LayerView] = []
    for layer, has in zip(view.layers, turned, strict=True):
        if not has:
            others.append(layer)
            continue
        heads += layer.q.shape[0]
        found = [logits_of(rows) for both in (layer.q, layer.k) for rows in both]
        spreads += [spread_of(rows) for rows in found if rows is not None]
        # Reads have steps half as large.
        spreads += [] if layer.read is None else [2 * spread_of(np.log(x)) for x in layer.read]
    fixed = _page_bytes(TextView(others, view.surprise), 8)
    for step in STEPS[:-1]:
        # Five letters for four bytes, of codes somewhat longer than they could be.
        bits = sum(LogRows(step).bytes(length, spread) for spread in spreads)
        # Order, gate and what a reader is multiplied by; knots.
        alike = heads * (length * (4 if levels_of(step) < 2**10 else 6) + 4000)
        if fixed + 1.25 * 1.03 * (alike + bits) <= limit_bytes:
            return step
    return STEPS[-1]


def _page_bytes(view: TextView, bits: int) -> int:
    """About how large a page of codes will be: five letters for four bytes."""
    total = 0
    for layer in view.layers:
        heads, length, size = layer.q.shape
        scales = layer.write.shape[2] * (1 if layer.read is None else 2)
        total += heads * length * (16 + 2 * size * bits / 8 + scales * 1.5)
    return int(total * 5 / 4) + 150_000


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
