"""How tokens are laid out in chunks: every sequence starts on a chunk of its own."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

__all__ = [
    "SHORTEST",
    "WORKSPACE",
    "Chunk",
    "DenseLayout",
    "Layout",
    "PackedLayout",
    "Plan",
    "make_layout",
]

# Shorter chunks than this spend more on their states than on their tokens.
SHORTEST = 16

# Elements of a segment's largest temporaries together. They are built and used up segment by
# segment: on a CPU they should stay in its cache, a GPU wants more work at once.
WORKSPACE = {"cpu": 3 << 19, "cuda": 1 << 26}


@dataclass(frozen=True)
class Plan:
    """Sizes that follow from shapes alone, so that a traced program knows them too."""

    chunk: int
    per_segment: int
    max_segments: int

    @staticmethod
    def of(
        q: Tensor, v: Tensor, write: Tensor, cu_seqlens: Tensor | None, chunk_size: int
    ) -> "Plan":
        """The chunk length (shorter where sequences are), chunks in a segment, segments at most."""
        rows, length, heads, _ = q.shape
        sequences = 1 if cu_seqlens is None else max(cu_seqlens.shape[0] - 1, 1)
        chunk = chunk_size
        # A chunk is padded to its full length: do not spend 64 positions on sequences of 10.
        while chunk % (2 * SHORTEST) == 0 and chunk // 2 >= length / sequences:
            chunk //= 2
        chunks = length // chunk + sequences
        size = max(q.shape[3], v.shape[3])
        # A position takes a row for each time scale, and a handful of others whatever S is.
        width = max(1, rows * heads * chunk * (write.shape[-1] * size + 4 * max(size, chunk)))
        budget = WORKSPACE.get(q.device.type, WORKSPACE["cuda"])
        per_segment = min(max(1, budget // width), max(1, chunks))
        return Plan(chunk, per_segment, -(-chunks // per_segment))


@dataclass(frozen=True)
class Chunk:
    """One chunk: its tokens, and the sequences that start or end with it (a slice of states)."""

    length: int
    first: slice | None
    last: slice | None


class Layout(ABC):
    """Chunks in order, and how to load and store a run of them."""

    chunks: Sequence[Chunk]
    rows: int

    def __init__(self, chunk: int, device: torch.device) -> None:
        self.chunk = chunk
        self.device = device

    @abstractmethod
    def load(self, x: Tensor, start: int, stop: int, out: Tensor) -> Tensor:
        """Fill out [n, rows, H, C, D] with chunks start..stop of x [B, T, H, D], padded with 0."""

    @abstractmethod
    def store(self, x: Tensor, start: int, stop: int, value: Tensor) -> None:
        """Write [n, rows, H, C, D] to the places of chunks start..stop in x, padding dropped."""

    def segments(self, size: int) -> list[tuple[int, int]]:
        """Runs of at most `size` chunks that cover all."""
        total = len(self.chunks)
        return [(start, min(start + size, total)) for start in range(0, total, size)]


class DenseLayout(Layout):
    """B sequences of one length: chunk c of all of them together, only the last one padded."""

    def __init__(self, batch: int, length: int, chunk: int, device: torch.device) -> None:
        super().__init__(chunk, device)
        self.rows, self.length = batch, length
        count = -(-length // chunk)
        everyone = slice(0, batch)
        self.chunks = [
            Chunk(
                min(chunk, length - c * chunk),
                everyone if c == 0 else None,
                everyone if c == count - 1 else None,
            )
            for c in range(count)
        ]

    def _tokens(self, start: int, stop: int) -> slice:
        return slice(start * self.chunk, min(stop * self.chunk, self.length))

    def load(self, x: Tensor, start: int, stop: int, out: Tensor) -> Tensor:
        """See Layout."""
        piece = x[:, self._tokens(start, stop)]
        missing = (stop - start) * self.chunk - piece.shape[1]
        if missing:
            piece = torch.nn.functional.pad(piece, (0, 0, 0, 0, 0, missing))
        count = stop - start
        piece = piece.view(x.shape[0], count, self.chunk, *x.shape[2:])
        return out.copy_(piece.permute(1, 0, 3, 2, 4))

    def store(self, x: Tensor, start: int, stop: int, value: Tensor) -> None:
        """See Layout."""
        place = x[:, self._tokens(start, stop)]
        tokens = value.permute(1, 0, 3, 2, 4)
        if place.shape[1] == (stop - start) * self.chunk:
            place.unflatten(1, (stop - start, self.chunk)).copy_(tokens)
        else:
            place.copy_(tokens.flatten(1, 2)[:, : place.shape[1]])


class PackedLayout(Layout):
    """Sequences of any length in one row: chunks follow each other, each sequence's last padded."""

    def __init__(self, bounds: Sequence[int], chunk: int, device: torch.device) -> None:
        super().__init__(chunk, device)
        self.rows = 1
        chunks, starts = [], []
        for index, (begin, end) in enumerate(pairwise(bounds)):
            state = slice(index, index + 1)
            for start in range(begin, end, chunk):
                starts.append(start)
                length = min(chunk, end - start)
                last = state if start + chunk >= end else None
                chunks.append(Chunk(length, state if start == begin else None, last))
        self.chunks = chunks
        offsets = torch.arange(chunk)
        lengths = torch.tensor([item.length for item in chunks], dtype=torch.long)
        self._used = (offsets < lengths[:, None]).to(device)
        self._token = (torch.tensor(starts, dtype=torch.long)[:, None] + offsets).to(device)
        self._token = self._token.masked_fill_(~self._used, 0)

    def load(self, x: Tensor, start: int, stop: int, out: Tensor) -> Tensor:
        """See Layout."""
        tokens = x[0].index_select(0, self._token[start:stop].flatten())
        tokens = tokens.view(stop - start, self.chunk, *x.shape[2:]).transpose(1, 2)
        unused = ~self._used[start:stop, None, :, None]
        return out.copy_(tokens.unsqueeze(1)).masked_fill_(unused.unsqueeze(1), 0)

    def store(self, x: Tensor, start: int, stop: int, value: Tensor) -> None:
        """See Layout."""
        used = self._used[start:stop]
        tokens = value.squeeze(1).transpose(1, 2)[used]
        x[0].index_copy_(0, self._token[start:stop][used], tokens.to(x.dtype))


def make_layout(q: Tensor, cu_seqlens: Tensor | None, chunk: int) -> Layout:
    """The layout of q [B, T, H, K], packed where `cu_seqlens` says so."""
    if cu_seqlens is None:
        return DenseLayout(q.shape[0], q.shape[1], chunk, q.device)
    return PackedLayout(cu_seqlens.tolist(), chunk, q.device)
