"""How tokens are laid out in chunks, how many are worked on at once, and the memory for them."""

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from vort.ops.products import ONE_BY_ONE
from vort.ops.retention.inputs import Inputs, check_bounds, count_sequences

__all__ = [
    "SHORTEST",
    "WORKSPACE",
    "Chunk",
    "DenseLayout",
    "Layout",
    "PackedLayout",
    "Plan",
    "Workspace",
    "make_layout",
]

# Shorter chunks than this spend more on their states than on their tokens.
SHORTEST = 16

# Elements of a piece's largest temporaries together. They are built and used up piece by piece: on
# a CPU they should stay in its cache, a GPU wants more work at once. Without MKL (Neoverse N1) a
# call costs more than a miss: with four times as many a step is a tenth shorter, alone or beside
# another process.
WORKSPACE = {"cpu": 3 << 21 if ONE_BY_ONE else 3 << 19, "cuda": 1 << 26}
# Elements of states that a call keeps for its backward, if it can keep those before every chunk.
FEW_STATES = 1 << 22
# Shapes of temporaries that are remembered: a model's layers, and its pieces, have a few dozen.
MOST_VIEWS = 1 << 10


@dataclass(frozen=True)
class Plan:
    """Sizes that follow from shapes alone, so that a traced program knows them too.

    chunk: its length. per_piece: chunks of a piece. kept_every: chunks from one state that is kept
    to the next, 1 or those of a piece. max_kept: how many are.
    """

    chunk: int
    per_piece: int
    kept_every: int
    max_kept: int

    @staticmethod
    def of(inputs: Inputs) -> "Plan":
        """The chunk length (shorter where sequences are), chunks in a piece, pieces at most."""
        (rows, length, heads, keys), values = inputs.k.shape, inputs.v.shape[3]
        sequences = 1 if inputs.cu_seqlens is None else max(count_sequences(inputs), 1)
        chunk = inputs.chunk_size or 64
        # A chunk is padded to its full length: do not spend 64 positions on sequences of 10.
        while chunk % (2 * SHORTEST) == 0 and chunk // 2 >= length / sequences:
            chunk //= 2
        # Every packed sequence may end within a chunk; where, no shape says.
        packed = inputs.cu_seqlens is not None
        chunks = length // chunk + sequences if packed else -(-length // chunk)
        size = max(keys, values)
        # A position takes a row for each scale, and a handful of others whatever S is.
        num_scales = inputs.write.shape[-1]
        width = max(1, rows * heads * chunk * (num_scales * size + 4 * max(size, chunk)))
        budget = WORKSPACE.get(inputs.q.device.type, WORKSPACE["cuda"])
        per_piece = min(max(1, budget // width), max(1, chunks))
        states = chunks * rows * heads * num_scales * keys * values
        every = 1 if states <= FEW_STATES else per_piece
        return Plan(chunk, per_piece, every, -(-chunks // every))


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

    def pieces(self, size: int) -> list[tuple[int, int]]:
        """Runs of at most `size` chunks that cover all."""
        total = len(self.chunks)
        return [(start, min(start + size, total)) for start in range(0, total, size)]


class DenseLayout(Layout):
    """B sequences of one length: chunk c of all of them together, only the last one padded."""

    def __init__(self, batch: int, length: int, chunk: int, device: torch.device) -> None:
        super().__init__(chunk, device)
        self.rows, self.length = batch, length
        count = -(-length // chunk) if batch else 0
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
    bounds = cu_seqlens.tolist()
    # A traced program comes here unchecked, and tokens of no chunk would be left uninitialised.
    check_bounds(bounds, q.shape[1])
    return PackedLayout(bounds, chunk, q.device)


class Workspace:
    """Memory that outlives the temporaries in it: by name, written over from piece to piece.

    Fresh pages cost a CPU more than the sums that fill them, so there the buffers also outlive the
    call: one set for each thread, no larger than a few workspaces.
    """

    _of_thread = threading.local()

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self.views: dict[tuple[str, torch.dtype, tuple[int, ...]], Tensor] = {}
        if like.device.type == "cpu":
            self.buffers = self._of_thread.__dict__.setdefault("buffers", {})
            self.views = self._of_thread.__dict__.setdefault("views", {})
        if _fills_memory():
            for buffer in self.buffers.values():
                buffer.fill_(math.nan)  # as torch.empty would, so that a missed write shows

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor of this shape, contents undefined; it overwrites the last one of its name."""
        place = (name, self.like.dtype, shape)
        view = self.views.get(place)
        if view is None:
            size, key = math.prod(shape), place[:2]
            buffer = self.buffers.get(key)
            if buffer is None or buffer.numel() < size or len(self.views) >= MOST_VIEWS:
                self.views.clear()  # of a buffer that gives way, and whenever they are many
            # What is made in inference mode cannot be written to outside of it.
            with torch.inference_mode(False), torch.no_grad():
                if buffer is None or buffer.numel() < size:
                    buffer = torch.empty(size, dtype=self.like.dtype, device=self.like.device)
                    self.buffers[key] = buffer
                view = self.views[place] = buffer[:size].view(shape)
        return view

    def close(self) -> None:
        """Let go of what is too large to keep."""
        for key in [key for key, x in self.buffers.items() if x.numel() > 2 * WORKSPACE["cpu"]]:
            del self.buffers[key]
            self.views.clear()


def _fills_memory() -> bool:
    """Whether torch.empty comes back filled with NaN."""
    fills = bool(getattr(torch.utils.deterministic, "fill_uninitialized_memory", False))
    return fills and torch.are_deterministic_algorithms_enabled()
