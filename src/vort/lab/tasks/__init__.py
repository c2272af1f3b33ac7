"""Sequences to train and test memories on: generated ones, books, and what users' files hold.

>>> task = make_task("zipf_retrieval", length=1000, pairs=16, beta=1.5)
>>> task.batch("validation", [0])["input_ids"].shape
torch.Size([1, 1000])
"""

from vort.lab.tasks.babi import BABI, WikiHop
from vort.lab.tasks.books import Books
from vort.lab.tasks.haystack import answers_right
from vort.lab.tasks.label_copy import LabelCopy
from vort.lab.tasks.mqar import MQAR
from vort.lab.tasks.multi_needle import MultiNeedle
from vort.lab.tasks.parts import KeyVocabulary, PartsEmbedding, embed_parts, sources_by_key
from vort.lab.tasks.ruler import SYNTHETIC, Ruler
from vort.lab.tasks.scan import CFQ, SCAN
from vort.lab.tasks.task import IGNORED, SPLITS, TASKS, Batch, Split, Task, make_task
from vort.lab.tasks.zipf_retrieval import ZipfRetrieval

__all__ = [
    "BABI",
    "CFQ",
    "IGNORED",
    "MQAR",
    "SCAN",
    "SPLITS",
    "SYNTHETIC",
    "TASKS",
    "Batch",
    "Books",
    "KeyVocabulary",
    "LabelCopy",
    "MultiNeedle",
    "PartsEmbedding",
    "Ruler",
    "Split",
    "Task",
    "WikiHop",
    "ZipfRetrieval",
    "answers_right",
    "embed_parts",
    "make_task",
    "sources_by_key",
]
