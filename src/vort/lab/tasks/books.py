"""Next-character prediction in long texts (table pg19), and where the texts come from.

Documents are split so that no file is in two splits.
"""

import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vort.lab.tasks.task import SPLITS, Batch, Integers, Split, Task, check_split, stream

__all__ = ["Books", "Corpus", "Document", "load_corpus"]

HUB = "hf:"
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Document:
    """A text, in bytes, and the name of where it came from."""

    name: str
    text: bytes


Corpus = dict[Split, list[Document]]


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
    text: ClassVar[bool] = True
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

    def kinds(self, batch: Batch) -> dict[str, Tensor]:
        """Names found by the rule probe ("entity"), letters of other words, and the rest."""
        from vort.layers.entity_probe import RuleProbe

        tokens = batch["input_ids"]
        named = torch.zeros_like(tokens, dtype=torch.bool)
        for row, ids in enumerate(tokens):
            # One character for each byte, so that spans of characters are spans of tokens.
            text = bytes(ids.tolist()).decode("latin-1")
            for start, end in RuleProbe().probe(text):
                named[row, start:end] = True
        letters = ((tokens >= 65) & (tokens <= 90)) | ((tokens >= 97) & (tokens <= 122))
        return {"entity": named, "other letters": ~named & letters, "rest": ~named & ~letters}


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


def load_corpus(
    source: str,
    *,
    validation_files: int = 10,
    max_documents: int | None = None,
    column: str = "text",
) -> Corpus:
    """Training, validation and test documents.

    Args:
        source: "stdlib" for the source of Python's standard library; "hf:NAME" or
            "hf:NAME:CONFIG" for a data set of the Hugging Face hub (or a folder that `datasets`
            can read), streamed; else a folder of .txt files, or of `train`, `test` and perhaps
            `validation` folders of them.
        validation_files: training documents to hold out where there is no validation split.
        max_documents: the most that are read for each split from the hub.
        column: where a data set of the hub keeps its text.
    """
    if source == "stdlib":
        corpus = _deal(_stdlib())
    elif source.startswith(HUB):
        corpus = _from_hub(source.removeprefix(HUB), column, max_documents)
    else:
        corpus = _from_folder(Path(source).expanduser())
    _hold_out(corpus, validation_files)
    _drop_copies(corpus)
    for split in SPLITS:
        if not corpus[split]:
            raise ValueError(f"source {source!r} has no documents for the split {split!r}")
    return corpus


def _stdlib() -> Iterator[Document]:
    """The .py files of the standard library, without its tests and what was installed beside it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not skipped & set(name.parts):
            yield Document(name.as_posix(), path.read_bytes())


def _from_folder(root: Path) -> Corpus:
    if not root.is_dir():
        raise FileNotFoundError(
            f'source must be "stdlib", "hf:NAME" or a folder, and {str(root)!r} is not a folder'
        )
    if not (root / "train").is_dir():
        return _deal(_texts(root))
    if not (root / "test").is_dir():
        raise FileNotFoundError(f"source {str(root)!r} has a folder train but no folder test")
    return {split: list(_texts(root / split)) for split in SPLITS}


def _texts(folder: Path) -> Iterator[Document]:
    for path in sorted(folder.rglob("*.txt")):
        yield Document(path.relative_to(folder).as_posix(), path.read_bytes())


def _from_hub(name: str, column: str, max_documents: int | None) -> Corpus:
    """Documents streamed from the hub: what is not needed is not fetched."""
    from datasets import (  # type: ignore[import-untyped, unused-ignore]
        get_dataset_split_names,
        load_dataset,
    )

    path, _, config = name.partition(":")
    known = get_dataset_split_names(path, config or None)

    def read(split: str) -> list[Document]:
        if split not in known:
            return []
        rows: Iterable[dict[str, Any]] = load_dataset(
            path, config or None, split=split, streaming=True
        )
        texts = (str(row[column]).encode() for row in islice(rows, max_documents))
        return [Document(f"{split}/{number}", text) for number, text in enumerate(texts)]

    corpus: Corpus = {split: read(split) for split in SPLITS}
    if not corpus["test"]:
        return _deal(corpus["train"])
    return corpus


def _deal(documents: Iterable[Document]) -> Corpus:
    """A tenth for testing, a twentieth for validation, by the hash of a name: stable if some go."""
    corpus: Corpus = {split: [] for split in SPLITS}
    for document in documents:
        place = _hash(document.name.encode()) % 20
        split: Split = "test" if place < 2 else "validation" if place == 2 else "train"
        corpus[split].append(document)
    return corpus


def _hold_out(corpus: Corpus, count: int) -> None:
    """Move `count` training documents to an empty validation split: those of lowest hash."""
    train = corpus["train"]
    if corpus["validation"] or not train:
        return
    if not 1 <= count < len(train):
        raise ValueError(
            f"validation_files must lie in [1, {len(train) - 1}], with {len(train)} documents to "
            f"train on, got {count}"
        )
    chosen = sorted(train, key=lambda document: _hash(document.name.encode()))[:count]
    names = {document.name for document in chosen}
    corpus["validation"] = [document for document in train if document.name in names]
    corpus["train"] = [document for document in train if document.name not in names]


def _drop_copies(corpus: Corpus) -> None:
    """Leave each text in one split only: test before validation before training."""
    seen: set[int] = set()
    for split in reversed(SPLITS):
        kept = {_hash(document.text): document for document in corpus[split] if document.text}
        corpus[split] = [document for key, document in kept.items() if key not in seen]
        seen |= kept.keys()


def _hash(data: bytes) -> int:
    return int.from_bytes(sha256(data).digest()[:8], "big")
