"""Arrays as text for a page: few bits for each number, at a stated relative precision.

Features are positive and span many powers of ten, and a retrieval weight is a sum of their
products: what must be small is the relative error of each. So a number is kept as the logarithm of
its share of the largest in its row, in equal steps; 12 bits over 14 natural units are 0.17 % off at
most, where 16-bit floats would make the page a third larger.
"""

import base64
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vort.lab.report.lens.view import LayerView

__all__ = ["Codes", "LogCode", "encode_head"]

Floats = NDArray[np.float32]
SPAN = 14.0  # natural units below the largest of a row; what is smaller counts as nothing
SAMPLED = 12  # positions of each head at which the page's weights are held against the model's


@dataclass(frozen=True)
class Codes:
    """Rows of numbers as codes.

    Attributes:
        packed: the codes, row after row.
        largest: `[rows]`, the largest magnitude of each.
    """

    packed: bytes
    largest: Floats


@dataclass(frozen=True)
class LogCode:
    """A code of 8 or 12 bits: 0, then magnitudes from e^-14 to 1 in equal ratios, then signed.

    Attributes:
        bits: 8 or 12.
        signed: whether the upper half of the codes is negative.

    >>> code = LogCode(12, signed=False)
    >>> x = np.array([[0.5, 1e-3, 0.0, 2.0]], dtype=np.float32)
    >>> bool((abs(code.decode(code.encode(x), 4) - x) <= code.precision * abs(x)).all())
    True
    """

    bits: int
    signed: bool

    def __post_init__(self) -> None:
        if self.bits not in (8, 12):
            raise ValueError(f"bits must be 8 or 12, got {self.bits}")

    @property
    def levels(self) -> int:
        """Magnitudes other than zero."""
        return (1 << (self.bits - self.signed)) - 1

    @property
    def precision(self) -> float:
        """Largest relative error of a number within the span."""
        return float(np.expm1(SPAN / (self.levels - 1) / 2)) * (1 + 1e-5)

    def table(self) -> Floats:
        """What each code stands for, as a share of its row's largest."""
        magnitudes = np.exp(np.linspace(-SPAN, 0, self.levels))
        table = np.concatenate([[0], magnitudes])
        return np.concatenate([table, -table] if self.signed else [table]).astype(np.float32)

    def encode(self, rows: Floats) -> Codes:
        """Codes of `[rows, columns]`."""
        rows = np.ascontiguousarray(rows, dtype=np.float32)
        largest = np.abs(rows).max(axis=1, initial=0)
        share = np.abs(rows) / np.maximum(largest, np.float32(1e-38))[:, None]
        logs = np.log(np.maximum(share, 1e-30))
        step = SPAN / (self.levels - 1)
        code = np.rint((logs + SPAN) / step).astype(np.int64) + 1
        code = np.where(code < 1, 0, np.minimum(code, self.levels))
        if self.signed:
            code = np.where(rows < 0, code + self.levels + 1, code)
        return Codes(self._pack(code.ravel()), largest.astype(np.float32))

    def decode(self, codes: Codes, columns: int) -> Floats:
        """`[rows, columns]`, as the page will see them."""
        count = len(codes.largest) * columns
        shares = self.table()[self._unpack(codes.packed, count)].reshape(-1, columns)
        decoded: Floats = shares * codes.largest[:, None]
        return decoded

    def _pack(self, code: NDArray[np.int64]) -> bytes:
        if self.bits == 8:
            return code.astype(np.uint8).tobytes()
        even, odd = np.append(code, 0)[: len(code) + len(code) % 2].reshape(-1, 2).T
        parts = [even & 255, even >> 8 | (odd & 15) << 4, odd >> 4]
        return np.stack(parts, 1).astype(np.uint8).tobytes()

    def _unpack(self, packed: bytes, count: int) -> NDArray[np.int64]:
        data = np.frombuffer(packed, np.uint8).astype(np.int64)
        if self.bits == 8:
            return data
        low, middle, high = data.reshape(-1, 3).T
        pairs = np.stack([low | (middle & 15) << 8, middle >> 4 | high << 4], 1)
        return pairs.ravel()[:count]


def encode_head(
    layer: LayerView, head: int, features: LogCode, routes: LogCode
) -> tuple[str, float]:
    """One head as base64, and how far its weights on the page are from the model's.

    The order of the parts is that of `lens_memory.js`: three numbers for each token (what a reader
    and what a writer is multiplied by, its largest write weight), orders, gates, then codes.
    """
    length = layer.q.shape[1]
    q, k = features.encode(layer.q[head]), features.encode(layer.k[head])
    write = routes.encode(layer.write[head])
    read = None if layer.read is None else routes.encode(layer.read[head])
    gate = np.ones(length, np.float32) if layer.gate is None else layer.gate[head]
    order = np.zeros(length, np.float32) if layer.order is None else layer.order[head]
    reader = q.largest / layer.denominator[head] * (1 if read is None else read.largest)
    parts = [
        reader.astype("<f4").tobytes(),
        k.largest.astype("<f4").tobytes(),
        (write.largest * gate).astype("<f4").tobytes(),
        _sixteen_bits(order),
        _sixteen_bits(gate),
        write.packed,
        b"" if read is None else read.packed,
        q.packed,
        k.packed,
    ]
    scales, size = layer.write.shape[2], layer.q.shape[2]
    shown = replace(
        layer,
        gate=layer.gate if layer.gate is None else layer.gate[head : head + 1],
        write=routes.decode(write, scales)[None],
        read=None if read is None else routes.decode(read, scales)[None],
        rates=layer.rates[head : head + 1],
        q=features.decode(q, size)[None],
        k=features.decode(k, size)[None],
        denominator=layer.denominator[head : head + 1],
    )
    return base64.b64encode(b"".join(parts)).decode("ascii"), _largest_error(layer, shown, head)


def _largest_error(layer: LayerView, shown: LayerView, head: int) -> float:
    """Over sampled positions: the largest error of a weight, as a share of the largest weight."""
    length = layer.q.shape[1]
    worst = 0.0
    for position in np.unique(np.linspace(length - 1, 0, SAMPLED).astype(int)).tolist():
        exact = layer.weights(head, position).sum(1)
        error = np.abs(shown.weights(0, position).sum(1) - exact).max()
        worst = max(worst, float(error / max(float(np.abs(exact).max()), 1e-30)))
    return worst


def _sixteen_bits(shares: NDArray[np.float32]) -> bytes:
    """Numbers in [0, 1], to 1 part in 65,535."""
    return np.rint(np.clip(shares, 0, 1) * 65535).astype("<u2").tobytes()
