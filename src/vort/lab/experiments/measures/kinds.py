"""Which token of a test sequence is of which kind."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["kinds_of"]


def kinds_of(task: Any, batch: Any) -> dict[str, Tensor]:
    """Which positions `[B, T]` are of which kind.

    Kinds: anchors (or first mentions), queries (or later mentions) and fillers of generated tasks;
    names found by the rule probe, letters of other words and everything else in text.
    """
    tokens = batch["input_ids"]
    if hasattr(task, "vocabulary"):
        asked = batch["labels"] >= 0
        shows = task.vocabulary.shows_key(tokens)
        return {"first": shows & ~asked, "again": shows & asked, "filler": ~shows}
    from vort.layers.entity_probe import RuleProbe

    named = torch.zeros_like(tokens, dtype=torch.bool)
    for row, ids in enumerate(tokens):
        # One character for each byte, so that spans of characters are spans of tokens.
        text = bytes(ids.tolist()).decode("latin-1")
        for start, end in RuleProbe().probe(text):
            named[row, start:end] = True
    letters = ((tokens >= 65) & (tokens <= 90)) | ((tokens >= 97) & (tokens <= 122))
    return {"entity": named, "other letters": ~named & letters, "rest": ~named & ~letters}
