"""Sequences to train and test memories on: generated ones, and books.

>>> task = make_task("zipf_retrieval", length=1000, pairs=16, beta=1.5)
>>> task.batch("validation", [0])["input_ids"].shape
torch.Size([1, 1000])
"""

import difflib
from dataclasses import fields
from typing import Any

from vort.lab.tasks.books import Books
from vort.lab.tasks.embedding import PartsEmbedding, embed_parts
from vort.lab.tasks.label_copy import LabelCopy
from vort.lab.tasks.mqar import MQAR
from vort.lab.tasks.streams import SPLITS, Split
from vort.lab.tasks.task import IGNORED, Batch, Task
from vort.lab.tasks.vocabulary import KeyVocabulary, sources_by_key
from vort.lab.tasks.zipf_retrieval import ZipfRetrieval

__all__ = [
    "IGNORED",
    "MQAR",
    "SPLITS",
    "TASKS",
    "Batch",
    "Books",
    "KeyVocabulary",
    "LabelCopy",
    "PartsEmbedding",
    "Split",
    "Task",
    "ZipfRetrieval",
    "embed_parts",
    "make_task",
    "sources_by_key",
]

TASKS: dict[str, type[Task]] = {kind.name: kind for kind in (ZipfRetrieval, LabelCopy, MQAR, Books)}


def make_task(name: str, **settings: Any) -> Task:
    """The task called `name`, one of `TASKS`, with these settings; unknown ones are an error."""
    if name not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {name!r}")
    kind = TASKS[name]
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; it has {', '.join(known)}"
            raise TypeError(f"task {name!r} has no setting {key!r}{hint}")
    return kind(**settings)
