"""Where texts come from, and which of them train, validate and test.

Texts that come in splits keep them. Others are split in proportion, the same way each time: by
document where there are enough of them, else each document at the same places.
"""

import re
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from vort.lab.tasks import packed
from vort.lab.tasks.packed import FileText, Text
from vort.lab.tasks.task import SPLITS, Split

__all__ = [
    "HUB",
    "Corpus",
    "Document",
    "find_source",
    "fingerprint",
    "is_large",
    "is_path",
    "load_corpus",
]

HUB = "hf:"
STDLIB = "stdlib"
# Of the bytes of a text that does not come in splits.
SHARES: dict[Split, float] = {"train": 0.85, "validation": 0.05, "test": 0.1}
# Fewer documents than this are never one of a split as a whole: each is split by itself.
_ENOUGH = 20


@dataclass(frozen=True)
class Document:
    """A text, in bytes, the name of where it came from, and whether it begins and ends there."""

    name: str
    text: Text
    begins: bool = True
    ends: bool = True


class Corpus(dict[Split, list[Document]]):
    """Documents by split.

    Attributes:
        how: how they were split, in words.
        left_out: what was not taken, in words; "" if nothing.
    """

    how: str = "the splits they came in"
    left_out: str = ""
    spool: Any = None  # what was fetched and is too large for memory, deleted with the corpus


def is_large(source: str, max_bytes: int | None = None) -> bool:
    """Whether the texts of a source are too large to be read into memory."""
    if source == STDLIB:
        return False
    if source.startswith(HUB):
        return max_bytes is None or max_bytes > packed.LARGE
    return sum(path.stat().st_size for path in _files(Path(source).expanduser())) > packed.LARGE


def fingerprint(source: str, **settings: Any) -> str:
    """Changes when a source does: by names, sizes and times of its files, unread."""
    found = [repr(sorted(settings.items()))]
    if is_path(source):
        for path in _files(Path(source).expanduser()):
            about = path.stat()
            found.append(f"{path} {about.st_size} {about.st_mtime_ns}")
    else:
        found.append(source)
    return sha256("\n".join(found).encode()).hexdigest()


def _files(root: Path) -> list[Path]:
    if not root.is_dir():
        return [root] if root.is_file() else []
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    return [path for path in files if not _hidden(path.relative_to(root))]


def is_path(source: str) -> bool:
    """Whether a source is a file or folder, there or not."""
    return source != STDLIB and not source.startswith(HUB)


def find_source(given: str) -> str:
    """The source that a user means: a file or folder as an absolute path, or a data set.

    What is not there is a data set only if it cannot be a slip in a path: OWNER/NAME where no
    folder OWNER is here, or "hf:NAME".

    >>> find_source("hf:wikitext:wikitext-2-raw-v1")
    'hf:wikitext:wikitext-2-raw-v1'
    >>> find_source("roneneldan/TinyStories")
    'hf:roneneldan/TinyStories'
    """
    path = Path(given).expanduser()
    if path.exists():
        return str(path.resolve())
    if given == STDLIB or given.startswith(HUB):
        return given
    named = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+)?", given)
    if named and not path.parent.exists() and path.suffix not in (".txt", ".md"):
        return HUB + given
    raise FileNotFoundError(
        f"no such file or folder: {given} (a data set of Hugging Face is OWNER/NAME, or hf:NAME)"
    )


def load_corpus(
    source: str,
    *,
    validation_files: int = 10,
    max_documents: int | None = None,
    max_bytes: int | None = None,
    column: str = "text",
) -> Corpus:
    """Training, validation and test documents.

    Args:
        source: "stdlib" for the source of Python's standard library; "hf:NAME" or
            "hf:NAME:CONFIG" for a data set of the Hugging Face hub (or a folder that `datasets`
            can read), streamed; else a file, or a folder of .txt files (of any texts where it has
            none), or of `train`, `test` and perhaps `validation` folders of them.
        validation_files: training documents to hold out where there is a test split and no
            validation split; of fewer documents a share is.
        max_documents: the most that are read for each split from the hub.
        max_bytes: the most that are read from the hub, all splits together.
        column: where a data set of the hub keeps its text.
    """
    if validation_files < 1:
        raise ValueError(f"validation_files must be at least 1, got {validation_files}")
    if source == STDLIB:
        corpus = _deal(_stdlib())
    elif source.startswith(HUB):
        corpus = _from_hub(source.removeprefix(HUB), column, max_documents, max_bytes)
    else:
        corpus = _from_path(Path(source).expanduser())
    _hold_out(corpus, validation_files)
    _drop_copies(corpus)
    for split in SPLITS:
        if not corpus[split]:
            raise ValueError(
                f"source {source!r} has too little text: no documents for the split {split!r}"
            )
    return corpus


def _stdlib() -> Iterator[Document]:
    """The .py files of the standard library, without its tests and what was installed beside it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not skipped & set(name.parts):
            yield Document(name.as_posix(), path.read_bytes())


def _from_path(root: Path) -> Corpus:
    if root.is_file():
        text = _read(root, is_large(str(root)))
        if _is_binary(text):
            raise ValueError(f"{root} is no text: it holds zero bytes")
        return _in_proportion([Document(root.name, text)])
    if not root.is_dir():
        raise FileNotFoundError(
            f'source must be "stdlib", "hf:NAME", a file or a folder, and {str(root)!r} is neither'
        )
    if not (root / "train").is_dir():
        documents, left_out = _texts(root)
        corpus = _in_proportion(documents)
        corpus.left_out = left_out
        return corpus
    if not (root / "test").is_dir():
        raise FileNotFoundError(f"source {str(root)!r} has a folder train but no folder test")
    return Corpus({split: _texts(root / split)[0] for split in SPLITS})


def _texts(folder: Path) -> tuple[list[Document], str]:
    """The .txt files of a folder, or all its texts where it has none; and what is left out."""
    files = _files(folder)
    chosen = [path for path in files if path.suffix == ".txt"]
    large = sum(path.stat().st_size for path in chosen or files) > packed.LARGE
    if chosen:
        documents, why = [_document(path, folder, large) for path in chosen], "that are not .txt"
    else:
        read = [_document(path, folder, large) for path in files]
        documents, why = [d for d in read if not _is_binary(d.text)], "that are no text"
    missing = len(files) - len(documents)
    return documents, f"{missing:,} files {why}" if missing else ""


def _document(path: Path, folder: Path, large: bool) -> Document:
    return Document(path.relative_to(folder).as_posix(), _read(path, large))


def _read(path: Path, large: bool) -> Text:
    return FileText(path) if large else path.read_bytes()


def _is_binary(text: Text) -> bool:
    return b"\0" in bytes(text[:8192])


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _from_hub(name: str, column: str, max_documents: int | None, max_bytes: int | None) -> Corpus:
    """Documents streamed from the hub: what is not needed is not fetched."""
    try:
        import datasets  # type: ignore[import-untyped, unused-ignore]
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"the data set {name} needs the package datasets: pip install datasets"
        ) from missing

    path, _, config = name.partition(":")
    datasets.disable_progress_bars()
    try:
        known = datasets.get_dataset_split_names(path, config or None)
    except Exception as problem:  # of many kinds: no connection, no such data set, a broken one
        reason = str(problem).strip().splitlines() or [type(problem).__name__]
        raise ValueError(f"the data set {name} could not be loaded: {reason[0]}") from problem
    room = float("inf") if max_bytes is None else max_bytes
    cut = False
    spool = tempfile.TemporaryDirectory() if room > packed.LARGE else None

    def read(split: str, most: float) -> list[Document]:
        nonlocal cut
        found: list[Document] = []
        if split not in known:
            return found
        rows: Iterable[dict[str, Any]] = datasets.load_dataset(
            path, config or None, split=split, streaming=True
        )
        size = 0
        file = None if spool is None else (Path(spool.name) / split).open("wb")
        for number, row in enumerate(rows):
            if number == max_documents or size >= most:
                cut = True
                break
            if column not in row:
                raise ValueError(
                    f"the data set {name} has no column {column!r}, it has {', '.join(row)}: give "
                    "--task-set column=NAME"
                )
            text = str(row[column]).encode()
            if file is not None:
                file.write(text)
            kept = text if file is None else FileText(file.name, size, size + len(text))
            size += len(text)
            found.append(Document(f"{split}/{number}", kept))
        if file is not None:
            file.close()
        return found

    corpus = Corpus({split: read(split, room * SHARES[split]) for split in SPLITS})
    if not corpus["test"]:
        corpus = _in_proportion(corpus["train"])
    corpus.left_out = "all beyond what was asked for at most" if cut else ""
    corpus.spool = spool
    return corpus


def _deal(documents: Iterable[Document]) -> Corpus:
    """A tenth for testing, a twentieth for validation, by the hash of a name: stable if some go."""
    corpus = Corpus({split: [] for split in SPLITS})
    for document in documents:
        place = _hash(document.name.encode()) % 20
        split: Split = "test" if place < 2 else "validation" if place == 2 else "train"
        corpus[split].append(document)
    corpus.how = "by document"
    return corpus


def _in_proportion(documents: Sequence[Document]) -> Corpus:
    """Documents dealt out so that bytes come near `SHARES`, or each cut into three where not."""
    unique = list({_hash(d.text): d for d in documents if d.text}.values())
    return _by_document(unique) or _within(unique, SHARES)


def _by_document(documents: Sequence[Document]) -> Corpus | None:
    """Whole documents, in an order that their names decide, each to the split that lacks most.

    None if there are few, or if one is so long that a split would be twice or half its share.
    """
    total = sum(len(document.text) for document in documents)
    if len(documents) < _ENOUGH:
        return None
    dealt: dict[Split, list[Document]] = {split: [] for split in SPLITS}
    size = dict.fromkeys(SPLITS, 0)
    for document in sorted(documents, key=lambda d: _hash(d.name.encode())):
        split = max(SPLITS, key=lambda s: SHARES[s] - size[s] / total)
        dealt[split].append(document)
        size[split] += len(document.text)
    if not all(0.5 <= size[split] / total / SHARES[split] <= 2 for split in SPLITS):
        return None
    corpus = Corpus({s: sorted(dealt[s], key=lambda document: document.name) for s in SPLITS})
    corpus.how = "by document"
    return corpus


def _within(documents: Sequence[Document], shares: dict[Split, float]) -> Corpus:
    """Every document cut at the same places: its beginning trains, its end tests."""
    corpus = Corpus({split: [] for split in SPLITS})
    for document in documents:
        text, start, share = document.text, 0, 0.0
        for split, part in shares.items():
            share += part
            stop = len(text) if split == list(shares)[-1] else _cut(text, round(share * len(text)))
            piece = replace(
                document,
                text=text[start:stop],
                begins=document.begins and start == 0,
                ends=document.ends and stop == len(text),
            )
            if piece.text:
                corpus[split].append(piece)
            start = stop
    corpus.how = "at the same places in every document" if len(documents) > 1 else "by position"
    return corpus


def _cut(text: Text, near: int) -> int:
    """A place at `near` or up to three bytes before it that is inside of no letter of UTF-8."""
    for place in range(near, max(near - 4, 0), -1):
        if place == len(text) or text[place] & 0b1100_0000 != 0b1000_0000:
            return place
    return near


def _hold_out(corpus: Corpus, count: int) -> None:
    """Give an empty validation split `count` training documents, those of lowest hash.

    Where that would leave less than half of them, a share of the training text instead.
    """
    train = corpus["train"]
    if corpus["validation"] or not train:
        return
    if 2 * count <= len(train):
        chosen = sorted(train, key=lambda document: _hash(document.name.encode()))[:count]
        names = {document.name for document in chosen}
        corpus["validation"] = [document for document in train if document.name in names]
        corpus["train"] = [document for document in train if document.name not in names]
        return
    _drop_copies(corpus)  # while they can be told: a part of a text is no copy of it
    parts = _within(corpus["train"], {"train": 0.95, "validation": 0.05})
    corpus["train"], corpus["validation"] = parts["train"], parts["validation"]


def _drop_copies(corpus: Corpus) -> None:
    """Leave each text in one split only: test before validation before training."""
    seen: set[int] = set()
    for split in reversed(SPLITS):
        kept = {_hash(document.text): document for document in corpus[split] if document.text}
        corpus[split] = [document for key, document in kept.items() if key not in seen]
        seen |= kept.keys()


def _hash(data: Text) -> int:
    digest = data.digest() if isinstance(data, FileText) else sha256(data).digest()
    return int.from_bytes(digest[:8], "big")
