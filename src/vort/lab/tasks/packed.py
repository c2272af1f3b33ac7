"""Texts larger than memory: read a block at a time, and packed into files of tokens to be mapped.

`FileText` stands for the bytes of a file wherever a text is asked for its length, cut or hashed.
`Packed` is a folder with the tokens of all documents of a split end to end, which any number of
processes map and of which each reads what it needs.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

__all__ = ["LARGE", "FileText", "Packed", "Text", "blocks"]

# Bytes above which a text is not read into memory.
LARGE = 2**28
_BLOCK = 2**24
_INDEX = "index.json"


class FileText:
    """A part of a file, which is read when its bytes are wanted.

    >>> text = FileText(__file__)
    >>> bytes(text[:3]) == Path(__file__).read_bytes()[:3]
    True
    """

    def __init__(self, path: str | Path, start: int = 0, stop: int | None = None) -> None:
        self.path, self.start = Path(path), start
        self.stop = self.path.stat().st_size if stop is None else stop
        self._digest: bytes | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> "FileText": ...

    def __getitem__(self, place: int | slice) -> "int | FileText":
        if isinstance(place, slice):
            low, high, _ = place.indices(len(self))
            return FileText(self.path, self.start + low, self.start + max(low, high))
        at = range(self.start, self.stop)[place]
        return self._read(at, 1)[0]

    def __bytes__(self) -> bytes:
        return self._read(self.start, len(self))

    def blocks(self) -> Iterator[bytes]:
        """All of it, some at a time."""
        for at in range(self.start, self.stop, _BLOCK):
            yield self._read(at, min(_BLOCK, self.stop - at))

    def digest(self) -> bytes:
        """SHA-256 of all of it."""
        if self._digest is None:
            found = sha256()
            for block in self.blocks():
                found.update(block)
            self._digest = found.digest()
        return self._digest

    def _read(self, at: int, count: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(at)
            found = file.read(count)
        if len(found) < count:
            raise OSError(f"{self.path} has become shorter while it was read")
        return found


Text = bytes | FileText


def blocks(text: Text) -> Iterator[bytes]:
    """A text some at a time, or all at once where it is in memory."""
    yield from [text] if isinstance(text, bytes) else text.blocks()


class Packed:
    """Tokens of texts in a folder: `train.bin`, `validation.bin` and `test.bin`, and an index.

    Args:
        folder: where they are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index: dict[str, Any] = json.loads((folder / _INDEX).read_text())

    @classmethod
    def open(cls, folder: Path, source: str) -> "Packed | None":
        """What is in a folder, if it was packed from this source as it is now; else None."""
        try:
            found = cls(folder)
        except (OSError, ValueError):
            return None
        return found if found.index["source"] == source else None

    @classmethod
    def write(
        cls,
        folder: Path,
        source: str,
        documents: dict[str, Sequence[tuple[Text, Sequence[int], Sequence[int]]]],
        about: dict[str, Any],
        dtype: str,
    ) -> "Packed":
        """Pack texts with the tokens before and after each; whole or not at all.

        Args:
            folder: where to.
            source: by which `open` knows them.
            documents: by split.
            about: what else the index is to hold.
            dtype: of a token.
        """
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            for split, texts in documents.items():
                lengths = []
                with (partial / f"{split}.bin").open("wb") as file:
                    for text, before, after in texts:
                        file.write(np.asarray(before, dtype).tobytes())
                        for block in blocks(text):
                            file.write(np.frombuffer(block, np.uint8).astype(dtype).tobytes())
                        file.write(np.asarray(after, dtype).tobytes())
                        lengths.append(len(before) + len(text) + len(after))
                    file.flush()
                    os.fsync(file.fileno())
                np.save(partial / f"{split}.npy", np.asarray(lengths, np.int64))
            index = {**about, "source": source, "dtype": dtype}
            (partial / _INDEX).write_text(json.dumps(index, indent=1))
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return cls(folder)

    def tokens(self, split: str) -> NDArray[Any]:
        """All tokens of a split, mapped: what is not looked at is not read."""
        found: NDArray[Any] = np.memmap(
            self.folder / f"{split}.bin", dtype=self.index["dtype"], mode="r"
        )
        return found

    def lengths(self, split: str) -> list[int]:
        """Tokens of each document."""
        found = np.load(self.folder / f"{split}.npy", allow_pickle=False)
        return [int(n) for n in found]
