"""Arrays as text for a page: few bits for each number, at a stated precision.

Features are positive and span many powers of ten, and a retrieval weight is a sum of their
products: what must be small is the relative error of each. So logarithms are kept, in one of two
ways.

`LogRows` is for features that are softmaxes of something and of its negative (Hedgehog's): half as
many logits, turned into axes along which they spread alike and weights feel alike, in steps that
are as fine as there is room for. Most steps are few, so deflating them leaves little more than
their entropy.

`LogCode` is for all others: a number is the logarithm of its share of the largest in its row; 12
bits over 14 natural units are 0.17 % off at most.
"""

import zlib
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vort.lab.report.lens.view import LayerView

__all__ = [
    "Codes",
    "LogCode",
    "LogRows",
    "as_text",
    "encode_head",
    "levels_of",
    "logits_of",
    "softmaxes",
    "spread_of",
]

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


class Turned(NamedTuple):
    """Rows as steps along axes.

    Attributes:
        mean: `[columns]`.
        axes: `[columns, columns]`, an axis a row; those of largest spread first.
        scale: of the axes.
        steps: `[rows, columns]`, how far along each; 2 n for n steps, 2 n - 1 for n steps back.
    """

    mean: Floats
    axes: NDArray[np.int8]
    scale: np.float32
    steps: NDArray[np.uint16]


@dataclass(frozen=True)
class LogRows:
    """Rows of logarithms, all in equal steps along the axes of their spread.

    >>> x = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    >>> rows = LogRows(0.01)
    >>> bool((abs(rows.decode(rows.encode(x)) - x) < 0.01).all())
    True
    """

    step: float

    def encode(self, rows: Floats, felt: NDArray[np.float64] | None = None) -> Turned:
        """Steps of `[rows, columns]`.

        felt: `[columns, columns]`, what errors are squared by; None: all are felt alike.
        """
        mean = rows.mean(0, dtype=np.float64).astype(np.float32)
        apart = rows.astype(np.float64) - mean
        root, back = _roots(np.eye(rows.shape[1]) if felt is None else felt)
        spread = apart @ root
        exact = np.linalg.eigh(spread.T @ spread)[1].T[::-1] @ back
        scale = np.float32(np.abs(exact).max() / 127)
        axes = np.rint(exact / scale).astype(np.int8)
        # Of axes as they are kept, which are not quite those.
        along = np.rint(apart @ np.linalg.inv(axes * float(scale)) / self.step)
        steps = np.where(along < 0, -2 * along - 1, 2 * along)
        return Turned(mean, axes, scale, np.minimum(steps, 65535).astype(np.uint16))

    def decode(self, turned: Turned) -> Floats:
        """`[rows, columns]`, as the page will see them."""
        steps = turned.steps.astype(np.float64)
        along = np.where(steps % 2, -(steps + 1) / 2, steps / 2) * self.step
        found: Floats = (along @ (turned.axes * float(turned.scale)) + turned.mean).astype(
            np.float32
        )
        return found

    def bytes(self, count: int, spread: NDArray[np.float64]) -> float:
        """About how many so many rows take: as many bits as normal numbers of this spread have."""
        bits = np.log2(np.maximum(spread / self.step, 0.3)) + 0.5 * np.log2(2 * np.pi * np.e)
        return float(count * bits.sum() / 8 + len(spread) ** 2)


def spread_of(rows: Floats) -> NDArray[np.float64]:
    """Standard deviations of rows along the axes of their spread."""
    apart = rows.astype(np.float64) - rows.mean(0)
    return np.sqrt(np.maximum(np.linalg.eigvalsh(apart.T @ apart / len(rows)), 0))


def _roots(felt: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """A square root of it and the inverse, of determinant 1; nothing is felt not at all."""
    values, vectors = np.linalg.eigh(felt)
    values = np.maximum(values, 0) / max(float(np.maximum(values, 0).mean()), 1e-30) + 0.5
    roots = np.sqrt(values / np.exp(np.log(values).mean()))
    return (vectors * roots) @ vectors.T, (vectors / roots) @ vectors.T


def logits_of(features: Floats) -> Floats | None:
    """What `[rows, columns]` are the softmaxes of, `[rows, columns / 2]`; None: of nothing.

    >>> x = np.array([[0.2, -1.0]], dtype=np.float32)
    >>> bool(np.allclose(softmaxes(logits_of(softmaxes(x))), softmaxes(x)))
    True
    """
    half = features.shape[1] // 2
    if half < 2 or features.shape[1] % 2 or not (features > 0).all():
        return None
    logs = np.log(features[:, :half])
    logs -= logs.mean(1, keepdims=True)
    return logs if np.allclose(softmaxes(logs), features, rtol=1e-2, atol=1e-4) else None


def softmaxes(logits: Floats) -> Floats:
    """Softmax of rows, and of their negatives beside it."""
    found = []
    for x in (logits, -logits):
        powers = np.exp(x - x.max(1, keepdims=True))
        found.append(powers / powers.sum(1, keepdims=True))
    return np.concatenate(found, 1)


def levels_of(step: float | None) -> int:
    """Of orders, gates and the like: fewer beside coarse steps, among which more are lost."""
    return 1023 if step is not None and step > 0.05 else 65535


class Head(NamedTuple):
    """One head for the page.

    Attributes:
        text: two deflated parts, each as `as_text` writes it; in the order of `lens_memory.js`.
        about: what the page must know to read it.
        worst: by how much any sampled weight is off, as a share of the largest at its position.
        usual: root mean square of what sampled weights that have a colour are off by, each as a
            share of itself.
    """

    text: str
    about: dict[str, Any]
    worst: float
    usual: float


def encode_head(layer: LayerView, head: int, features: LogCode, step: float | None) -> Head:
    """One head of a layer.

    Args:
        layer: whose.
        head: which.
        features: the code of features that are no softmaxes.
        step: of logits; None: features are no softmaxes.
    """
    routes = LogCode(12, signed=False)
    gate = np.ones(layer.q.shape[1], np.float32) if layer.gate is None else layer.gate[head]
    order = None if layer.order is None else layer.order[head]
    about: dict[str, Any] = {}
    levels = levels_of(step)
    gates, shown_gate = _logs(gate, levels, about, "gate")
    parts = [_shares(np.zeros_like(gate) if order is None else order, levels), gates]
    knots = None if order is None else _knots(order, layer.write[head])
    if order is None or knots is None:
        write = routes.encode(layer.write[head])
        parts += [write.largest.astype("<f4").tobytes(), write.packed]
        shown_write = routes.decode(write, layer.write.shape[2])
    else:
        about["knots"] = len(knots)
        largest = knots[:, 1:].max()
        parts += [knots[:, 0].astype("<f4").tobytes(), largest.astype("<f4").tobytes()]
        parts.append(np.rint(knots[:, 1:] / largest * 65535).astype("<u2").tobytes())
        shown_write = _between(knots, order)
    if step is None:
        coded, small = _coded(layer, head, features, routes, parts), b""
    else:
        coded, small = _turned(layer, head, LogRows(step), parts, about)
    shown = replace(
        coded,
        gate=shown_gate[None],
        write=shown_write[None],
        rates=layer.rates[head : head + 1],
    )
    # What is nearly noise gains nothing from a search for what was there before.
    texts = (as_text(_deflated(small, alone=True)), as_text(_deflated(b"".join(parts))))
    return Head(" ".join(texts), about, *_errors(layer, shown, head))


def _coded(
    layer: LayerView, head: int, features: LogCode, routes: LogCode, parts: list[bytes]
) -> LayerView:
    """Reads and features as codes, added to the parts; the layer as they show it."""
    q, k = features.encode(layer.q[head]), features.encode(layer.k[head])
    read = None if layer.read is None else routes.encode(layer.read[head])
    reader = q.largest / layer.denominator[head] * (1 if read is None else read.largest)
    parts += [reader.astype("<f4").tobytes(), k.largest.astype("<f4").tobytes()]
    parts += [b"" if read is None else read.packed, q.packed, k.packed]
    scales, size = layer.write.shape[2], layer.q.shape[2]
    return replace(
        layer,
        q=features.decode(q, size)[None],
        k=features.decode(k, size)[None],
        read=None if read is None else routes.decode(read, scales)[None],
        denominator=layer.denominator[head : head + 1],
    )


def _turned(
    layer: LayerView, head: int, rows: LogRows, parts: list[bytes], about: dict[str, Any]
) -> tuple[LayerView, bytes]:
    """Reads and features as steps, all but the least eight bits of which go to the parts.

    The layer as they show it, and those bits.
    """
    reader = 1 / layer.denominator[head]
    readers, shown_reader = _logs(reader, levels_of(rows.step), about, "reader")
    parts.append(readers)
    q, k = logits_of(layer.q[head]), logits_of(layer.k[head])
    assert q is not None
    assert k is not None
    given = list(zip((q, k), _felt(layer, head), (rows, rows), strict=True))
    if layer.read is not None:
        # Errors of features average out over many of them, those of scales over few.
        given.append((np.log(layer.read[head]), None, LogRows(rows.step / 2)))
    small, found = [], []
    for x, felt, code in given:
        turned = code.encode(x, felt)
        columns = np.ascontiguousarray(turned.steps.T)
        parts += [turned.mean.astype("<f4").tobytes(), turned.scale.astype("<f4").tobytes()]
        parts += [turned.axes.tobytes(), (columns >> 8).astype(np.uint8).tobytes()]
        small.append((columns & 255).astype(np.uint8).tobytes())
        found.append(code.decode(turned))
    read = None
    if layer.read is not None:
        powers = np.exp(found[2])
        read = (powers / powers.mean(1, keepdims=True))[None]
    shown = replace(
        layer,
        q=softmaxes(found[0])[None],
        k=softmaxes(found[1])[None],
        read=read,
        denominator=np.float32(1) / shown_reader[None],
    )
    return shown, b"".join(small)


def _felt(
    layer: LayerView, head: int
) -> tuple[NDArray[np.float64] | None, NDArray[np.float64] | None]:
    """How weights that have a colour feel errors of a query's and of a key's logits, squared."""
    length, half = layer.q.shape[1], layer.q.shape[2] // 2
    found = np.zeros((2, half, half))
    for position in np.unique(np.linspace(length - 1, 0, 2 * SAMPLED).astype(int)).tolist():
        weights = np.abs(layer.weights(head, position).sum(1))
        seen = np.flatnonzero(weights > _COLOURLESS * weights.max(initial=0))
        if not len(seen):
            continue
        q, k = layer.q[head, position].astype(np.float64), layer.k[head, seen].astype(np.float64)
        share = q * k / (k @ q)[:, None]
        for side, features in enumerate((q[None], k)):
            # Of a softmax: what a feature gains by its logit, all others of its half lose.
            up, down = (
                share[:, at] - share[:, at].sum(1, keepdims=True) * features[:, at]
                for at in (slice(None, half), slice(half, None))
            )
            found[side] += (up - down).T @ (up - down) / len(seen)
    return (found[0], found[1]) if found.any() else (None, None)


# Places between which write weights are drawn straight; how far off that may be.
_KNOTS, _STRAIGHT = 129, 5e-3


def _knots(order: Floats, write: Floats) -> Floats | None:
    """Orders and the write weights of each, `[knots, 1 + S]`, if the former decide the latter."""
    known, places = np.unique(order, return_index=True)
    even = np.searchsorted(known, np.linspace(known[0], known[-1], _KNOTS))
    places = places[np.unique(np.minimum(even, len(known) - 1))]
    knots = np.concatenate([order[places, None], write[places]], 1).astype(np.float32)
    off = np.abs(_between(knots, order) - write).max(1)
    return knots if (off <= _STRAIGHT * write.max(1)).all() else None


def _between(knots: Floats, order: Floats) -> Floats:
    columns = [np.interp(order, knots[:, 0], column) for column in knots.T[1:]]
    return np.stack(columns, 1).astype(np.float32)


# Weights smaller than this share of the largest of their position have no colour.
_COLOURLESS = 1e-3


def _errors(layer: LayerView, shown: LayerView, head: int) -> tuple[float, float]:
    """Of the weights at sampled positions: `Head.worst` and `Head.usual`."""
    length = layer.q.shape[1]
    worst, squares = 0.0, [np.zeros(1)]
    for position in np.unique(np.linspace(length - 1, 0, SAMPLED).astype(int)).tolist():
        exact = layer.weights(head, position).sum(1).astype(np.float64)
        error = np.abs(shown.weights(0, position).sum(1) - exact)
        largest = max(float(np.abs(exact).max()), 1e-30)
        worst = max(worst, float(error.max() / largest))
        seen = np.abs(exact) > _COLOURLESS * largest
        squares.append((error[seen] / np.abs(exact[seen])) ** 2)
    return worst, float(np.sqrt(np.concatenate(squares).mean()))


def _shares(x: Floats, levels: int) -> bytes:
    """Numbers in [0, 1], all low bytes before all high ones."""
    return _planes(np.rint(np.clip(x, 0, 1) * levels))


def _logs(x: Floats, levels: int, about: dict[str, Any], name: str) -> tuple[bytes, Floats]:
    """Positive numbers as steps of their logarithm, and as the page will see them.

    about: is told, under this name, between which logarithms they lie.
    """
    logs = np.log(np.maximum(x.astype(np.float64), 1e-30))
    low, high = float(logs.min()), float(logs.max())
    about[name] = [low, high]
    codes = np.rint((logs - low) / max(high - low, 1e-9) * levels)
    shown: Floats = np.exp(low + codes / levels * (high - low)).astype(np.float32)
    return _planes(codes), shown


def _planes(codes: NDArray[np.float64]) -> bytes:
    whole = codes.astype(np.int64)
    return (whole & 255).astype(np.uint8).tobytes() + (whole >> 8).astype(np.uint8).tobytes()


def _deflated(data: bytes, *, alone: bool = False) -> bytes:
    """alone: whether bytes are counted one by one, not looked for in what was before."""
    strategy = zlib.Z_HUFFMAN_ONLY if alone else zlib.Z_DEFAULT_STRATEGY
    # Blocks of a few thousand bytes each have a code of their own: columns differ.
    deflate = zlib.compressobj(9, zlib.DEFLATED, 15, 6 if alone else 9, strategy)
    return deflate.compress(data) + deflate.flush()


# Printable, and none that a page could take for its own.
_LETTERS = np.frombuffer(
    b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%()*+-;=?@^_`{|}~,./",
    np.uint8,
)


def as_text(data: bytes) -> str:
    """How many bytes there are, a colon, and five letters for every four of them.

    >>> as_text(bytes([0, 0, 0, 1, 255])), len(_LETTERS)
    ('5:00001~~R30', 85)
    """
    numbers = np.frombuffer(data + bytes(-len(data) % 4), ">u4").astype(np.int64)
    digits = np.stack([numbers // 85**place % 85 for place in (4, 3, 2, 1, 0)], 1)
    return f"{len(data)}:" + _LETTERS[digits.ravel()].tobytes().decode("ascii")
