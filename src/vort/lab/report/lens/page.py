"""The page of the lens: what the browser needs to recompute any retrieval weight, and no more.

A text of T tokens has T² / 2 weights for each head: too many for a page. It holds the features
instead, from which the browser computes a row or a column in milliseconds, exact up to the
precision of the codes (`vort.lab.report.lens.codes`), which is measured here and said on the page.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vort.lab.report.lens.cells import Cell, cells_of
from vort.lab.report.lens.codes import LogCode, as_base64
from vort.lab.report.lens.view import LayerView, TextView
from vort.lab.report.standalone import read_part, standalone_page

__all__ = ["LensText", "lens_page"]

LIMIT_BYTES = 15_000_000
SCRIPTS = ("_memory", "_charts", "_text", "_colours", "_panel", "_selection", "")
SAMPLED = 12  # positions of each head at which the page's weights are held against the model's


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
            block, error = _encode_head(layer, head, features, routes)
            blocks[f"head-{index}-{head}"] = block
            worst = max(worst, error)
        layers.append(
            {
                "heads": layer.q.shape[0],
                "features": layer.q.shape[2],
                "terms": layer.write.shape[2],
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
        "title": title,
        "notes": list(source.notes),
        "about": about,
        "tokens": len(source.offsets),
        "cells": {
            "shown": [cell.shown for cell in cells],
            "first": [cell.first for cell in cells],
            "flags": _flags(cells, source),
        },
        "surprise": [None if np.isnan(x) else round(float(x), 2) for x in view.surprise],
        "layers": layers,
        "bits": bits,
        "span": 14,
        "error": float(f"{worst:.1e}"),
    }
    return standalone_page(
        f"{title}: VORT lens",
        read_part("lens.html"),
        styles=["base.css", "lens.css"],
        scripts=[f"lens{part}.js" for part in SCRIPTS],
        data=data,
        blocks=blocks,
    )


def _encode_head(
    layer: LayerView, head: int, features: LogCode, routes: LogCode
) -> tuple[str, float]:
    """One head as base64, and how far its weights on the page are from the model's.

    The order of the parts is that of `lens_memory.js`: three numbers for each token (what a reader
    and what a writer is multiplied by, the write weights' scale), orders, gates, then codes.
    """
    length = layer.q.shape[1]
    q, k = features.encode(layer.q[head]), features.encode(layer.k[head])
    write = routes.encode(layer.write[head])
    read = None if layer.read is None else routes.encode(layer.read[head])
    gate = np.ones(length, np.float32) if layer.gate is None else layer.gate[head]
    order = np.zeros(length, np.float32) if layer.order is None else layer.order[head]
    reader = q.scale / layer.denominator[head] * (1 if read is None else read.scale)
    parts = [
        reader.astype("<f4").tobytes(),
        k.scale.astype("<f4").tobytes(),
        (write.scale * gate).astype("<f4").tobytes(),
        _sixteen_bits(order),
        _sixteen_bits(gate),
        write.packed,
        b"" if read is None else read.packed,
        q.packed,
        k.packed,
    ]
    terms, size = layer.write.shape[2], layer.q.shape[2]
    shown = replace(
        layer,
        gate=layer.gate if layer.gate is None else layer.gate[head : head + 1],
        write=routes.decode(write, terms)[None],
        read=None if read is None else routes.decode(read, terms)[None],
        rates=layer.rates[head : head + 1],
        q=features.decode(q, size)[None],
        k=features.decode(k, size)[None],
        denominator=layer.denominator[head : head + 1],
    )
    return as_base64(b"".join(parts)), _largest_error(layer, shown, head)


def _largest_error(layer: LayerView, shown: LayerView, head: int) -> float:
    """Over sampled positions: the largest error of a weight, as a share of the largest weight."""
    length = layer.q.shape[1]
    worst = 0.0
    for position in np.unique(np.linspace(length - 1, 0, SAMPLED).astype(int)).tolist():
        exact = layer.weights(head, position).sum(1)
        error = np.abs(shown.weights(0, position).sum(1) - exact).max()
        worst = max(worst, float(error / max(float(np.abs(exact).max()), 1e-30)))
    return worst


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


def _sixteen_bits(shares: NDArray[np.float32]) -> bytes:
    """Numbers in [0, 1], to 1 part in 65,535."""
    return np.rint(np.clip(shares, 0, 1) * 65535).astype("<u2").tobytes()


def _page_bytes(view: TextView, bits: int) -> int:
    """About how large the page will be: base64 takes four letters for three bytes."""
    total = 0
    for layer in view.layers:
        heads, length, size = layer.q.shape
        terms = layer.write.shape[2] * (1 if layer.read is None else 2)
        total += heads * length * (16 + 2 * size * bits / 8 + terms * 1.5)
    return int(total * 4 / 3) + 150_000
