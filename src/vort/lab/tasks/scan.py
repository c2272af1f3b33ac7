"""SCAN and CFQ: commands and questions to be turned into programs, from their published files."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from vort.lab.tasks.question_files import find_file, read_json, read_text
from vort.lab.tasks.stored import Example, StoredTask, hold_out
from vort.lab.tasks.task import Split
from vort.names import check_choice

__all__ = ["CFQ", "SCAN"]

ScanSplit = Literal[
    "simple",
    "length",
    "addprim_jump",
    "addprim_turn_left",
    "template_around_right",
    "mcd1",
    "mcd2",
    "mcd3",
]
SCAN_SPLITS = (
    *("simple", "length", "addprim_jump", "addprim_turn_left", "template_around_right"),
    *("mcd1", "mcd2", "mcd3"),
)
CFQ_SPLITS = (
    "mcd1",
    "mcd2",
    "mcd3",
    "random_split",
    "question_pattern_split",
    "query_complexity_split",
)


def _program(asked: Sequence[str], answer: Sequence[str]) -> Example:
    """A question, a mark, and the answer with its end, all of which is asked for."""
    words = (*asked, "<out>", *answer, "<end>")
    return Example(words, tuple(range(len(asked) + 1, len(words))))


@dataclass(frozen=True, kw_only=True)
class SCAN(StoredTask):
    """Commands like "jump around left twice" to sequences of actions (Lake and Baroni 2018).

    Files are those of brendenlake/SCAN, with those of the MCD splits (Keysers et al. 2020) in the
    same format, in any folder below: `tasks_train_simple.txt`, `tasks_test_mcd1.txt`, ... A
    twentieth of the training commands validates. An answer is right if all of it is, its end too:
    `answers_right`.

    Args (and those of `StoredTask`):
        part: which split.
    """

    name: ClassVar[str] = "scan"
    part: ScanSplit = "simple"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("part", self.part, SCAN_SPLITS)

    def read(self) -> dict[Split, list[Example]]:
        """See `StoredTask.read`."""
        folder = Path(self.source).expanduser()
        train, validation = hold_out(self._file(folder, "train"))
        return {"train": train, "validation": validation, "test": self._file(folder, "test")}

    def _file(self, folder: Path, split: str) -> list[Example]:
        path = find_file(folder, f"tasks_{split}_{self.part}.txt")
        found = []
        for number, line in enumerate(read_text(path).splitlines(), 1):
            if not line.strip():
                continue
            parts = re.fullmatch(r"\s*IN:(.*?)OUT:(.*)", line)
            if parts is None or not parts[1].strip() or not parts[2].strip():
                raise ValueError(f"{path}:{number} must be IN: command OUT: actions: {line[:60]!r}")
            found.append(_program(parts[1].split(), parts[2].split()))
        return found


@dataclass(frozen=True, kw_only=True)
class CFQ(StoredTask):
    """Questions to SPARQL, entities replaced by marks (Keysers et al. 2020).

    Files are those of the published archive: `dataset.json`, a list of examples with
    `questionPatternModEntities` and `sparqlPatternModEntities`, and `splits/NAME.json` with
    `trainIdxs`, `devIdxs` and `testIdxs`.

    Args (and those of `StoredTask`):
        part: which split: mcd1, mcd2, mcd3, random_split, ...
    """

    name: ClassVar[str] = "cfq"
    length: int = 512
    part: str = "mcd1"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("part", self.part, CFQ_SPLITS)

    def read(self) -> dict[Split, list[Example]]:
        """See `StoredTask.read`."""
        folder = Path(self.source).expanduser()
        data, chosen = find_file(folder, "dataset.json"), find_file(folder, f"{self.part}.json")
        examples, splits = read_json(data), read_json(chosen)
        names: dict[Split, str] = {
            "train": "trainIdxs",
            "validation": "devIdxs",
            "test": "testIdxs",
        }
        if not isinstance(examples, list) or not isinstance(splits, dict):
            raise ValueError(f"{data} must be a list and {chosen} an object of CFQ")
        found: dict[Split, list[Example]] = {}
        for split, name in names.items():
            if not isinstance(splits.get(name), list):
                raise ValueError(f"{chosen} is no split of CFQ: no list {name!r}")
            found[split] = [_question(examples, number, data) for number in splits[name]]
        return found


def _question(examples: list[Any], number: Any, path: Path) -> Example:
    try:
        if number < 0:
            raise IndexError
        one = examples[number]
        question, query = one["questionPatternModEntities"], one["sparqlPatternModEntities"]
        asked = re.findall(r"[\w']+|[^\w\s]", question)
        return _program(asked, query.split())
    except (IndexError, KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"{path} has no example number {number!r} of CFQ") from problem
