"""Next-character prediction in long texts (table pg19), by position in the window."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from vort.lab.tasks.corpus import Corpus, Document, load_corpus
from vort.lab.tasks.streams import SPLITS, Split, check_split, stream
from vort.lab.tasks.task import Batch, Integers, Task

__all__ = ["Books"]

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Books(Task):
    """Windows of bytes; each position is asked for the next byte, so nothing is masked.

    Training windows start anywhere, drawn by index, and never run out. Validation and test windows
    lie side by side, so that every byte is asked for once (the ends of documents apart), in an
    order that mixes documents: the first few of them are a fair sample. A window lies in one
    document; documents too short for one are joined first.

    In ASCII text a byte is a character; `bytes_per_character` says how far other texts are from it.

    Args:
        source: "stdlib", a folder, or "hf:NAME"; see `load_corpus`.
        length: T, characters of a window that predictions are made from.
        seed: one seed, one sequence of training windows; the other splits do not depend on it.
        bounds: first positions of all position buckets but the first.
        validation_files: training documents to hold out where there is no validation split.
        max_documents: the most that are read for each split from the hub.
        column: where a data set of the hub keeps its text.

    >>> task = Books(length=512)
    >>> batch = task.batch("test", [0])
    >>> bool((batch["labels"][0, :-1] == batch["input_ids"][0, 1:]).all())
    True
    """

    name: ClassVar[str] = "books"
    score: ClassVar[Literal["accuracy", "bits"]] = "bits"
    source: str = "stdlib"
    length: int = 8192
    seed: int = 0
    bounds: tuple[int, ...] = (256, 1024, 4096)
    validation_files: int = 10
    max_documents: int | None = None
    column: str = "text"

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounds", tuple(self.bounds))
        object.__setattr__(self, "source", str(self.source))
        if self.length < 1:
            raise ValueError(f"length must be at least 1, got {self.length}")
        if list(self.bounds) != sorted(set(self.bounds)) or min(self.bounds, default=1) < 1:
            raise ValueError(f"bounds must be positive and increasing, got {self.bounds}")

    @property
    def vocab_size(self) -> int:
        """All bytes: the first 256 tokens of `ByteTokenizer`."""
        return 256

    @property
    def bucket_names(self) -> tuple[str, ...]:
        """Classes of position that this length reaches, e.g. "<256", "256-1024", ">=1024"."""
        bounds = [bound for bound in self.bounds if bound < self.length]
        if not bounds:
            return ("all",)
        between = [f"{low}-{high}" for low, high in pairwise(bounds)]
        return (f"<{bounds[0]}", *between, f">={bounds[-1]}")

    @cached_property
    def corpus(self) -> Corpus:
        """The documents of all splits, read when first asked for."""
        return load_corpus(
            self.source,
            validation_files=self.validation_files,
            max_documents=self.max_documents,
            column=self.column,
        )

    @cached_property
    def _texts(self) -> dict[Split, "_Texts"]:
        return {
            split: _Texts(documents, self.length + 1, split)
            for split, documents in self.corpus.items()
        }

    def size(self, split: Split) -> int | None:
        """Windows side by side in a split; training has no end."""
        check_split(split)
        return None if split == "train" else len(self._texts[split].side_by_side)

    def characters(self, split: Split) -> int:
        """Bytes in a split."""
        check_split(split)
        return len(self._texts[split].text)

    def bytes_per_character(self, split: Split) -> float:
        """1 for ASCII; bits per byte times this are bits per character."""
        check_split(split)
        texts = [document.text for document in self.corpus[split]]
        count = sum(len(text.decode(errors="replace")) for text in texts)
        return sum(map(len, texts)) / count

    @cached_property
    def digest(self) -> str:
        """A short hash of all texts: results on other texts are results of another task."""
        texts = (document.text for split in SPLITS for document in self.corpus[split])
        return sha256(b"".join(sha256(text).digest() for text in texts)).hexdigest()[:16]

    def batch(self, split: Split, indices: Sequence[int]) -> Batch:
        """The windows with these indices; see `Task.batch`."""
        self.check_indices(split, indices)
        texts = self._texts[split]
        if split == "train":
            starts = [texts.anywhere(stream(self.seed, self.name, split, i)) for i in indices]
        else:
            starts = texts.side_by_side[list(indices)].tolist()
        offsets = np.asarray(starts, dtype=np.int64)[:, None] + np.arange(self.length + 1)
        windows = torch.from_numpy(texts.text[offsets].astype(np.int64))
        positions = np.searchsorted(self.bounds, np.arange(self.length), side="right")
        rows = torch.from_numpy(positions.astype(np.int8)).expand(len(indices), -1)
        return {
            "input_ids": windows[:, :-1],
            "labels": windows[:, 1:],
            "buckets": rows,
            "sources": torch.full((1, 1), -1, dtype=torch.int32).expand(*rows.shape),
        }

    def describe(self) -> dict[str, Any]:
        """Name and every setting; see `Task.describe`."""
        return {"task": self.name, **asdict(self), "bounds": list(self.bounds)}


class _Texts:
    """The documents of a split end to end, and where windows of `width` bytes may start."""

    def __init__(self, documents: Sequence[Document], width: int, split: str) -> None:
        lengths = _join_short([len(document.text) for document in documents], width)
        if not lengths:
            total = sum(len(document.text) for document in documents)
            raise ValueError(
                f"length must be below {total}, the bytes of the split {split!r}, got {width - 1}"
            )
        self.text: Bytes = np.frombuffer(b"".join(d.text for d in documents), dtype=np.uint8)
        ends = np.cumsum(lengths)
        self.begins: Integers = (ends - lengths).astype(np.int64)
        # Windows side by side share a byte: the last label of one is the first input of the next.
        counts = [(length - 1) // (width - 1) for length in lengths]
        starts = np.concatenate(
            [
                begin + np.arange(count) * (width - 1)
                for begin, count in zip(self.begins, counts, strict=True)
            ]
        )
        self.side_by_side: Integers = np.random.default_rng(0).permutation(starts)
        self.rooms: Integers = np.cumsum(np.asarray(lengths) - width + 1)

    def anywhere(self, rng: np.random.Generator) -> int:
        """A start drawn uniformly among all that leave a window inside one document."""
        number = int(rng.integers(self.rooms[-1]))
        document = int(np.searchsorted(self.rooms, number, side="right"))
        before = int(self.rooms[document - 1]) if document else 0
        return int(self.begins[document]) + number - before


def _join_short(lengths: Sequence[int], width: int) -> list[int]:
    """Lengths after joining neighbours until each is at least `width`; [] if they never are."""
    joined: list[int] = []
    open_length = 0
    for length in lengths:
        open_length += length
        if open_length >= width:
            joined.append(open_length)
            open_length = 0
    if joined:
        joined[-1] += open_length
    return joined
