"""Questions about documents, from the files they are published in: SQuAD, HotpotQA, WikiHop.

Files are the user's. What is wrong with one is said in a line that names it.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from vort.files import read_regular

__all__ = [
    "Asked",
    "Questions",
    "find_file",
    "read_hotpotqa",
    "read_json",
    "read_squad",
    "read_text",
    "read_wikihop",
]


@dataclass(frozen=True)
class Asked:
    """A question, answers any of which will do, and by number the documents it is about.

    Attributes:
        question: the question.
        answers: all that are right.
        gold: documents that have to be there.
        near: others on the same subject, which come before all the rest.
        candidates: what to choose from, where there is a choice.
    """

    question: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    near: tuple[int, ...] = ()
    candidates: tuple[str, ...] = ()


@dataclass(frozen=True)
class Questions:
    """Different documents, and questions about them in the order of their file."""

    documents: list[str]
    asked: list[Asked]

    @property
    def digest(self) -> str:
        """A short hash of all of them."""
        return sha256(repr((self.documents, self.asked)).encode()).hexdigest()[:16]


def read_text(path: Path) -> str:
    """The text of a file that must be one."""
    if not path.exists():
        raise FileNotFoundError(f"no such file: {path}")
    try:
        return read_regular(path).decode()
    except UnicodeDecodeError as problem:
        raise ValueError(f"{path} is no text in UTF-8: {problem.reason}") from problem


def read_json(path: Path) -> Any:
    """What a file of JSON holds."""
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:  # numbers of too many digits are no syntax
        raise ValueError(f"{path} is no JSON: {problem}") from problem


def find_file(folder: Path, *patterns: str) -> Path:
    """The first file of a folder, or of one in it, that a pattern fits."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no such folder: {folder}")
    for pattern in patterns:
        found = sorted(path for path in folder.rglob(pattern) if path.is_file())
        if found:
            return found[0]
    raise FileNotFoundError(f"{folder} holds no file {' or '.join(patterns)}")


def read_squad(path: Path) -> Questions:
    """Questions of SQuAD, 1.1 or 2.0, that have an answer; near are other paragraphs of an article.

    The file is {"data": [{"paragraphs": [{"context": ..., "qas": [{"question": ...,
    "answers": [{"text": ...}], "is_impossible": ...}]}]}]}.
    """
    return _read(path, "SQuAD", _squad)


def _squad(data: Any) -> Questions:
    articles = [[p["context"] for p in article["paragraphs"]] for article in data["data"]]
    documents, number = _numbered(text for texts in articles for text in texts)
    asked = []
    for article, texts in zip(data["data"], articles, strict=True):
        about = {number[text] for text in texts}
        for paragraph in article["paragraphs"]:
            gold = number[paragraph["context"]]
            for question in paragraph["qas"]:
                if question["answers"] and not question.get("is_impossible", False):
                    answers = tuple(_answer(answer["text"]) for answer in question["answers"])
                    near = tuple(sorted(about - {gold}))
                    asked.append(Asked(_text(question["question"]), answers, (gold,), near))
    return Questions(documents, asked)


def read_hotpotqa(path: Path) -> Questions:
    """Questions of HotpotQA's distractor setting; all paragraphs of a question have to be there.

    The file is [{"question": ..., "answer": ..., "context": [[title, [sentence, ...]], ...]}].
    """
    return _read(path, "HotpotQA", _hotpotqa)


def _hotpotqa(data: Any) -> Questions:
    def texts(one: Any) -> list[str]:
        return [f"{_text(title)}\n{''.join(parts)}" for title, parts in one["context"]]

    documents, number = _numbered(text for one in data for text in texts(one))
    asked = [
        Asked(
            _text(one["question"]),
            (_answer(one["answer"]),),
            tuple(dict.fromkeys(number[text] for text in texts(one))),
        )
        for one in data
    ]
    return Questions(documents, asked)


def read_wikihop(path: Path) -> Questions:
    """Questions of WikiHop; a query is a relation and a subject, its answer one of the candidates.

    The file is [{"query": ..., "answer": ..., "candidates": [...], "supports": [...]}].
    """
    return _read(path, "WikiHop", _wikihop)


def _wikihop(data: Any) -> Questions:
    documents, number = _numbered(text for one in data for text in one["supports"])
    asked = []
    for one in data:
        candidates = tuple(map(_text, one["candidates"]))
        if _answer(one["answer"]) not in candidates:
            raise ValueError(f"the answer {one['answer']!r} is no candidate")
        gold = tuple(dict.fromkeys(number[text] for text in one["supports"]))
        # "place_of_birth jane doe" asks for the place of birth of jane doe.
        relation, _, subject = _text(one["query"]).partition(" ")
        question = f"{relation.replace('_', ' ')} of {subject}"
        asked.append(Asked(question, (one["answer"],), gold, candidates=candidates))
    return Questions(documents, asked)


def _read(path: Path, kind: str, parse: Callable[[Any], Questions]) -> Questions:
    data = read_json(path)
    try:
        found = parse(data)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        what = f"no {problem}" if isinstance(problem, KeyError) else str(problem)
        raise ValueError(f"{path} is no file of {kind}: {what}") from problem
    if not found.asked:
        raise ValueError(f"{path} is no file of {kind}: it has no question with an answer")
    return found


def _numbered(texts: Any) -> tuple[list[str], dict[str, int]]:
    """Different texts in order, and the number of each."""
    documents = sorted({_text(text) for text in texts})
    return documents, {text: number for number, text in enumerate(documents)}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"documents and questions must be texts, got {type(value).__name__}")
    value.encode()  # half a pair of surrogates, which JSON can spell, is no text
    return value


def _answer(value: Any) -> str:
    """An answer that says something: nothing is found in every text."""
    text = _text(value)
    if not text.strip():
        raise ValueError("an answer is empty")
    return text
