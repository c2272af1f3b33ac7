"""Documents for language modelling, from wherever they are, split so that no file is in two."""

import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

from vort.lab.tasks.streams import SPLITS, Split

__all__ = ["Corpus", "Document", "load_corpus"]

HUB = "hf:"


@dataclass(frozen=True)
class Document:
    """A text, in bytes, and the name of where it came from."""

    name: str
    text: bytes


Corpus = dict[Split, list[Document]]


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
