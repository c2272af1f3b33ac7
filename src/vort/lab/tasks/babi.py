"""bAbI and WikiHop: questions about what was just read, from their published files."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from vort.lab.tasks.question_files import Asked, Questions, find_file, read_text, read_wikihop
from vort.lab.tasks.stored import HELD_OUT, Example, StoredTask, hold_out
from vort.lab.tasks.task import IGNORED, Batch, Split, Task, check_split, stream

__all__ = ["BABI", "WikiHop"]

# The folder of the release with 10,000 questions, and the one that stands in for what it lacks.
_LARGE, _SMALL = "en-valid-10k", "en"


@dataclass(frozen=True, kw_only=True)
class BABI(StoredTask):
    """The twenty tasks together (Weston et al. 2015); a story with its questions is a sequence.

    An answer stands right after its question and is asked for there; of several words, all of
    them. Results are by task. Files are `qa1_train.txt`, `qa1_valid.txt`, `qa1_test.txt`, ... or
    `qa1_single-supporting-fact_train.txt`, ...; where there is none to validate, a twentieth of
    the stories does. In the folder of a whole release, the one of 10,000 questions is read, and
    `en` for training files that it lacks: `lacking` names their tasks.

    Args (and those of `StoredTask`):
        tasks: numbers of tasks.
    """

    name: ClassVar[str] = "babi"
    length: int = 2048
    packed: bool = True
    tasks: tuple[int, ...] = tuple(range(1, 21))

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "tasks", tuple(self.tasks))
        if not self.tasks or not all(1 <= task <= 20 for task in self.tasks):
            raise ValueError(f"tasks must be numbers from 1 to 20, got {self.tasks}")

    @property
    def bucket_names(self) -> tuple[str, ...]:
        """The tasks."""
        return tuple(f"qa{task}" for task in self.tasks)

    @property
    def _folders(self) -> list[Path]:
        folder = Path(self.source).expanduser()
        whole = (folder / _LARGE).is_dir()
        return [folder / _LARGE, folder / _SMALL] if whole else [folder]

    @cached_property
    def lacking(self) -> tuple[int, ...]:
        """Tasks whose training file comes from the smaller release."""
        return tuple(
            task for task in self.tasks if not any(self._folders[0].glob(f"qa{task}_*train.txt"))
        )

    def read(self) -> dict[Split, list[Example]]:
        """See `StoredTask.read`."""
        found: dict[Split, list[Example]] = {"train": [], "validation": [], "test": []}
        for bucket, task in enumerate(self.tasks):
            train = self._stories(task, "train", bucket)
            validation = self._stories(task, "valid", bucket, needed=False)
            if not validation:
                train, validation = hold_out(train)
            found["train"] += train
            found["validation"] += validation
            found["test"] += self._stories(task, "test", bucket)
        return found

    def _stories(self, task: int, split: str, bucket: int, *, needed: bool = True) -> list[Example]:
        names = (f"qa{task}_{split}.txt", f"qa{task}_*_{split}.txt")
        for folder in self._folders if needed else self._folders[:1]:
            if folder.is_dir() and any(any(folder.glob(name)) for name in names):
                return _read_stories(find_file(folder, *names), bucket)
        if not needed:
            return []
        raise FileNotFoundError(f"{self._folders[0]} holds no file {' or '.join(names)}")

    def describe(self) -> dict[str, Any]:
        """Every setting, and what came from the smaller release."""
        return {**super().describe(), "lacking": list(self.lacking)}


def _read_stories(path: Path, bucket: int) -> list[Example]:
    """Lines "1 a sentence." and "2 a question?<tab>answer<tab>facts"; 1 begins a story."""
    found, words, asked = [], [], []  # type: list[Example], list[str], list[int]
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        parts = re.fullmatch(r"(\d+) ([^\t]+)(?:\t([^\t]+)(?:\t.*)?)?", line)
        if parts is None:
            raise ValueError(f"{path}:{number} is no line of bAbI: {line[:60]!r}")
        if parts[1] == "1" and words:
            found.append(Example(tuple(words), tuple(asked), bucket))
            words, asked = [], []
        words += re.findall(r"[\w'-]+|[.?,]", parts[2].lower())
        if parts[3] is not None:
            answer = parts[3].strip().lower().split(",")
            asked += range(len(words), len(words) + len(answer))
            words += answer
    if words:
        found.append(Example(tuple(words), tuple(asked), bucket))
    return [story for story in found if story.asked]


@dataclass(frozen=True, kw_only=True)
class WikiHop(Task):
    """Documents, a relation and candidates as bytes, and the right one to be written (Welbl 2018).

    Files are `train.json` and `dev.json` of the published archive; `dev.json` tests, and a
    twentieth of the training questions validates. Documents longer than there is room for lose
    their beginning. Bytes after the answer are zeros.

    Args:
        source: folder of the files.
        length: T, bytes of a sequence.
        seed: of the order of documents, which means nothing.
    """

    name: ClassVar[str] = "wikihop"
    source: str = ""
    length: int = 16_384
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", str(self.source))
        if not self.source:
            raise ValueError("source must be the folder of wikihop's files: source=FOLDER")
        if self.length < 256:
            raise ValueError(f"length must be at least 256, got {self.length}")

    @cached_property
    def _questions(self) -> dict[Split, Questions]:
        folder = Path(self.source).expanduser()
        train = read_wikihop(find_file(folder, "train.json"))
        held = [number % HELD_OUT == 0 for number in range(len(train.asked))]
        kept = [one for one, out in zip(train.asked, held, strict=True) if not out]
        out = [one for one, out in zip(train.asked, held, strict=True) if out]
        if not kept:
            raise ValueError(f"{folder} must have two training questions or more: one validates")
        return {
            "train": Questions(train.documents, kept),
            "validation": Questions(train.documents, out),
            "test": read_wikihop(find_file(folder, "dev.json")),
        }

    @property
    def vocab_size(self) -> int:
        """Bytes."""
        return 256

    @property
    def bucket_names(self) -> tuple[str, ...]:
        """One bucket."""
        return ("all",)

    def size(self, split: Split) -> int:
        """Questions of a split."""
        check_split(split)
        return len(self._questions[split].asked)

    def batch(self, split: Split, indices: Sequence[int]) -> Batch:
        """The questions with these indices; see `Task.batch`."""
        self.check_indices(split, indices)
        shape = (len(indices), self.length)
        tokens = np.zeros(shape, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        for b, index in enumerate(indices):
            questions = self._questions[split]
            asked = questions.asked[index]
            order = stream(self.seed, self.name, split, index).permutation(len(asked.gold))
            documents = [questions.documents[asked.gold[place]] for place in order.tolist()]
            text, answer = _as_bytes(documents, asked, self.length)
            end = len(text) + len(answer)
            tokens[b, :end] = np.frombuffer(text + answer, dtype=np.uint8)
            labels[b, len(text) - 1 : end - 1] = tokens[b, len(text) : end]
        found = torch.from_numpy(labels)
        return {
            "input_ids": torch.from_numpy(tokens),
            "labels": found,
            "buckets": torch.where(found >= 0, 0, -1).to(torch.int8),
            "sources": torch.full(shape, -1, dtype=torch.int32),
        }

    def describe(self) -> dict[str, Any]:
        """Every setting; files are known by what they say, not by a path."""
        text = repr([(found.documents, found.asked) for found in self._questions.values()])
        digest = sha256(text.encode()).hexdigest()[:16]
        return {**super().describe(), "source": Path(self.source).name, "digest": digest}


def _as_bytes(documents: Sequence[str], asked: Asked, length: int) -> tuple[bytes, bytes]:
    """What is read, and what is to be written, of `length` bytes at most."""
    answer = f" {asked.answers[0]}\n".encode()
    choices = "; ".join(asked.candidates)
    question = f"\nQuestion: {asked.question}\nOne of: {choices}\nAnswer:".encode()
    text = "\n".join(documents).encode()
    room = length - len(question) - len(answer)
    if room < 0:
        raise ValueError(f"length must be at least {length - room} for a question, got {length}")
    return text[max(len(text) - room, 0) :] + question, answer
