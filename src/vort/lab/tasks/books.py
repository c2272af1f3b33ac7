"""Next-character prediction in long texts (table pg19): books, or a text of your own."""

import atexit
import codecs
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vort.lab.tasks.corpus import (
    Corpus,
    Document,
    fingerprint,
    is_large,
    is_path,
    load_corpus,
)
from vort.lab.tasks.packed import FileText, Packed, blocks
from vort.lab.tasks.task import SPLITS, Batch, Integers, Split, Task, check_split, stream

__all__ = ["Books"]

# Of `ByteTokenizer`: the tokens around a text.
BEGIN, END, MARKED_VOCABULARY = 257, 258, 259
# Settings that decide what is in the files of tokens.
_CHANGE_TEXTS = ("validation_files", "max_documents", "max_bytes", "column", "marks")


@dataclass(frozen=True, kw_only=True)
class Books(Task):
    """Windows of bytes; each position is asked for the next byte, so nothing is masked.

    Training windows start anywhere, drawn by index, and never run out. Validation and test windows
    lie side by side, so that every byte is asked for once (the ends of documents apart), in an
    order that mixes documents: the first few of them are a fair sample. A window lies in one
    document; documents too short for one are joined first.

    In ASCII text a byte is a character; `bytes_per_character` says how far other texts are from it.
    Texts too large for memory are packed into files of tokens, which are mapped; see `pack`.

    Args:
        source: "stdlib", a file, a folder, or "hf:NAME"; see `load_corpus`.
        length: T, characters of a window that predictions are made from.
        seed: one seed, one sequence of training windows; the other splits do not depend on it.
        bounds: first positions of all position buckets but the first.
        validation_files: training documents to hold out where there is a test split and no
            validation split.
        max_documents: the most that are read for each split from the hub.
        max_bytes: the most that are read from the hub.
        column: where a data set of the hub keeps its text.
        marks: documents stand between `ByteTokenizer`'s beginning and end of text, so that a model
            learns where one ends, and to write no token that is no byte.
        entities: batches hold an `entity_mask`, 1 at the character by which the rule probe knows
            that a name has ended. It is found from what stands before in the window: a mark on
            the name itself would tell the model what it is to predict.

    >>> task = Books(length=512)
    >>> batch = task.batch("test", [0])
    >>> bool((batch["labels"][0, :-1] == batch["input_ids"][0, 1:]).all())
    True
    """

    name: ClassVar[str] = "books"
    score: ClassVar[Literal["accuracy", "bits"]] = "bits"
    text: ClassVar[bool] = True
    source: str = "stdlib"
    length: int = 8192
    seed: int = 0
    bounds: tuple[int, ...] = (256, 1024, 4096)
    validation_files: int = 10
    max_documents: int | None = None
    max_bytes: int | None = None
    column: str = "text"
    marks: bool = False
    entities: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounds", tuple(self.bounds))
        object.__setattr__(self, "source", str(self.source))
        if self.length < 1:
            raise ValueError(f"length must be at least 1, got {self.length}")
        if list(self.bounds) != sorted(set(self.bounds)) or min(self.bounds, default=1) < 1:
            raise ValueError(f"bounds must be positive and increasing, got {self.bounds}")

    @property
    def vocab_size(self) -> int:
        """All bytes, the first 256 tokens of `ByteTokenizer`; with marks all of them."""
        return MARKED_VOCABULARY if self.marks else 256

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
            max_bytes=self.max_bytes,
            column=self.column,
        )

    @property
    def packed(self) -> Packed | None:
        """The files of tokens that texts are taken from; None: they are in memory."""
        found: Packed | None = vars(self).get("_packed")
        return found

    def pack(self, folder: Path) -> Packed | None:
        """Pack the tokens of large texts into a folder, once, and take them from there.

        None, and nothing happens, where the texts are small. What was packed before, here or by
        another process, is taken as it is if the source has not changed since.
        """
        if self.packed is None and is_large(self.source, self.max_bytes):
            settings = {name: getattr(self, name) for name in _CHANGE_TEXTS}
            source = fingerprint(self.source, **settings)
            vars(self)["_packed"] = Packed.open(folder, source) or self._write(folder, source)
        return self.packed

    def _write(self, folder: Path, source: str) -> Packed:
        corpus = self.corpus
        edges = ([BEGIN], [END]) if self.marks else ([], [])
        documents = {
            split: [(x.text, edges[0] * x.begins, edges[1] * x.ends) for x in corpus[split]]
            for split in SPLITS
        }
        about: dict[str, Any] = {
            "how": corpus.how,
            "left_out": corpus.left_out,
            "digest": _digest(corpus),
        }
        about["bytes"] = {split: sum(len(x.text) for x in corpus[split]) for split in SPLITS}
        dtype = "uint16" if self.marks else "uint8"
        return Packed.write(folder, source, documents, about, dtype)  # type: ignore[arg-type]

    @cached_property
    def _texts(self) -> dict[Split, "_Texts"]:
        if self.packed is None and any(
            isinstance(x.text, FileText) for split in SPLITS for x in self.corpus[split]
        ):
            place = tempfile.mkdtemp()
            atexit.register(shutil.rmtree, place, ignore_errors=True)
            self.pack(Path(place) / "tokens")
        packed, found = self.packed, {}
        for split in SPLITS:
            if packed is not None:
                tokens: Any = packed.tokens(split)
                lengths = packed.lengths(split)
            else:
                parts = [_tokens(document, self.marks) for document in self.corpus[split]]
                lengths, tokens = [len(x) for x in parts], np.concatenate(parts)
            found[split] = _Texts(tokens, lengths, self.length + 1, split)
        return found

    def of_length(self, length: int) -> "Books":
        """The same texts in windows of another length; they are not read again."""
        other = replace(self, length=length)
        if self.packed is not None:
            vars(other)["_packed"] = self.packed
        else:
            vars(other)["corpus"] = self.corpus
        return other

    def splits(self) -> tuple[dict[Split, int], str, str]:
        """Documents in each split, how they were split and what was left out, in words."""
        packed = self.packed
        if packed is not None:
            counts = {split: len(packed.lengths(split)) for split in SPLITS}
            return counts, packed.index["how"], packed.index["left_out"]
        counts = {split: len(self.corpus[split]) for split in SPLITS}
        return counts, self.corpus.how, self.corpus.left_out

    def size(self, split: Split) -> int | None:
        """Windows side by side in a split; training has no end."""
        check_split(split)
        return None if split == "train" else len(self._texts[split].side_by_side)

    def characters(self, split: Split) -> int:
        """Bytes in a split."""
        check_split(split)
        if self.packed is not None:
            return int(self.packed.index["bytes"][split])
        return sum(len(document.text) for document in self.corpus[split])

    def describe(self) -> dict[str, Any]:
        """Every setting and the texts' digest: texts are known by what they say, not by a path."""
        name = Path(self.source).name if is_path(self.source) else self.source
        return {**super().describe(), "source": name, "digest": self.digest}

    def bytes_per_character(self, split: Split) -> float:
        """1 for ASCII; bits per byte times this are bits per character."""
        check_split(split)
        texts = [document.text for document in self.corpus[split]]
        return sum(map(len, texts)) / sum(_letters(blocks(text)) for text in texts)

    @cached_property
    def digest(self) -> str:
        """A short hash of all texts: results on other texts are results of another task."""
        return _digest(self.corpus) if self.packed is None else str(self.packed.index["digest"])

    def batch(self, split: Split, indices: Sequence[int]) -> Batch:
        """The windows with these indices; see `Task.batch`."""
        self.check_indices(split, indices)
        texts = self._texts[split]
        if split == "train":
            starts = [texts.anywhere(stream(self.seed, self.name, split, i)) for i in indices]
        else:
            starts = texts.side_by_side[list(indices)].tolist()
        return self._windows(texts, starts, self.length)

    def within_documents(
        self, split: Split, length: int, most: int | None = None
    ) -> list[tuple[int, int]]:
        """(document, start in it) of windows of a length side by side, each in one document.

        Documents too short for a window have none: nothing is joined here. Where a document has
        room for more than `most`, these are spread over it.

        >>> Books().within_documents("test", 1000, most=2)[:3]
        [(0, 0), (0, 1000), (1, 0)]
        """
        found = []
        for document, size in enumerate(self._lengths(split)):
            count = (size - 1) // length
            kept = count if most is None else min(count, most)
            places = [number * count // kept for number in range(kept)]
            found += [(document, place * length) for place in places]
        return found

    def batch_at(self, split: Split, places: Sequence[tuple[int, int]], length: int) -> Batch:
        """The windows at places of `within_documents`, as `batch` gives those with indices."""
        lengths = self._lengths(split)
        begins = [0, *accumulate(lengths)]
        for document, start in places:
            if not 0 <= document < len(lengths) or not (0 <= start < lengths[document] - length):
                raise IndexError(
                    f"places of split {split!r} must leave {length + 1} characters of a "
                    f"document, got {(document, start)}"
                )
        starts = [begins[document] + start for document, start in places]
        return self._windows(self._texts[split], starts, length)

    def _lengths(self, split: Split) -> list[int]:
        """Tokens of each document."""
        check_split(split)
        if self.packed is not None:
            return list(self.packed.lengths(split))
        marks = 1 if self.marks else 0
        documents = self.corpus[split]
        return [len(x.text) + marks * (int(x.begins) + int(x.ends)) for x in documents]

    def _windows(self, texts: "_Texts", starts: Sequence[int], length: int) -> Batch:
        """The windows of a length that begin at these tokens of a split."""
        offsets = np.asarray(starts, dtype=np.int64)[:, None] + np.arange(length + 1)
        windows = torch.from_numpy(texts.text[offsets].astype(np.int64))
        positions = np.searchsorted(self.bounds, np.arange(length), side="right")
        rows = torch.from_numpy(positions.astype(np.int8)).expand(len(starts), -1)
        batch: Batch = {
            "input_ids": windows[:, :-1],
            "labels": windows[:, 1:],
            "buckets": rows,
            "sources": torch.full((1, 1), -1, dtype=torch.int32).expand(*rows.shape),
        }
        if self.entities:
            batch["entity_mask"] = torch.stack([_ended_names(row) for row in batch["input_ids"]])
        return batch

    def kinds(self, batch: Batch) -> dict[str, Tensor]:
        """Names found by the rule probe ("entity"), letters of other words, and the rest.

        Where batches hold an `entity_mask`, tokens that it marks are a kind of their own.
        """
        from vort.layers.entity_probe import RuleProbe

        tokens = batch["input_ids"]
        named = torch.zeros_like(tokens, dtype=torch.bool)
        for row, ids in enumerate(tokens):
            for start, end in RuleProbe().probe(_characters(ids)):
                named[row, start:end] = True
        letters = ((tokens >= 65) & (tokens <= 90)) | ((tokens >= 97) & (tokens <= 122))
        kinds = {"entity": named, "other letters": ~named & letters, "rest": ~named & ~letters}
        if "entity_mask" not in batch:
            return kinds
        marked = batch["entity_mask"].bool()
        return {"marked": marked} | {name: kind & ~marked for name, kind in kinds.items()}


def _characters(ids: Tensor) -> str:
    """One character for each token, so that spans of characters are spans of tokens."""
    return bytes(ids.where(ids < 256, 32).tolist()).decode("latin-1")


def _ended_names(ids: Tensor) -> Tensor:
    """`[T]`: 1 where a name before is known to have ended, from the tokens up to there alone."""
    from vort.layers.entity_probe import RuleProbe, entity_indicator

    text = _characters(ids)
    offsets = np.arange(len(text))[:, None] + np.arange(2)
    return entity_indicator(text, offsets, RuleProbe(causal=True), causal=True).long()


class _Texts:
    """The documents of a split end to end, and where windows of `width` tokens may start."""

    def __init__(
        self, tokens: NDArray[Any], lengths: Sequence[int], width: int, split: str
    ) -> None:
        lengths = _join_short(lengths, width)
        if not lengths:
            raise ValueError(
                f"length must be below {len(tokens)}, the bytes of the split {split!r}, "
                f"got {width - 1}"
            )
        self.text, self.width, self.joined = tokens, width, lengths
        ends = np.cumsum(lengths)
        self.begins: Integers = (ends - lengths).astype(np.int64)
        self.rooms: Integers = np.cumsum(np.asarray(lengths) - width + 1)

    @cached_property
    def side_by_side(self) -> Integers:
        """Starts of windows that share a byte: the last label of one is the next's first input."""
        width = self.width
        counts = [(length - 1) // (width - 1) for length in self.joined]
        starts = np.concatenate(
            [
                begin + np.arange(count) * (width - 1)
                for begin, count in zip(self.begins, counts, strict=True)
            ]
        )
        found: Integers = np.random.default_rng(0).permutation(starts)
        return found

    def anywhere(self, rng: np.random.Generator) -> int:
        """A start drawn uniformly among all that leave a window inside one document."""
        number = int(rng.integers(self.rooms[-1]))
        document = int(np.searchsorted(self.rooms, number, side="right"))
        before = int(self.rooms[document - 1]) if document else 0
        return int(self.begins[document]) + number - before


def _digest(corpus: Corpus) -> str:
    texts = (document.text for split in SPLITS for document in corpus[split])
    found = (x.digest() if isinstance(x, FileText) else sha256(x).digest() for x in texts)
    return sha256(b"".join(found)).hexdigest()[:16]


def _letters(parts: Iterable[bytes]) -> int:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return sum(len(decoder.decode(part)) for part in parts) + len(decoder.decode(b"", final=True))


def _tokens(document: Document, marks: bool) -> NDArray[np.unsignedinteger[Any]]:
    """The bytes of a document, between marks if wanted and where it really begins and ends."""
    text = np.frombuffer(bytes(document.text), dtype=np.uint8)
    if not marks:
        return text
    edges = ([BEGIN] * document.begins, [END] * document.ends)
    return np.concatenate([np.array(edges[0]), text, np.array(edges[1])]).astype(np.uint16)


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
