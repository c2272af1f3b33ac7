"""Which time scales a query reads, by kind of query."""

from typing import Any

import torch
from torch import Tensor

from vort.lab.experiments.measures.kinds import kinds_of
from vort.lab.experiments.measures.look import Look, look

__all__ = ["reads"]


def reads(model: Any, task: Any, config: Any, *, sequences: int = 16) -> dict[str, Any]:
    """Mean read weights over time scales, as shares that sum to 1, by kind of token.

    Kinds are those of `kinds_of`; queries of generated tasks are split by the task's classes of
    their true lag, which the model is not told.

    Args:
        model: trained.
        task: as trained on.
        config: of the training.
        sequences: how many of the test split.

    Returns:
        "layers": of each, "time_constants" (steps until a scale has 1/e left, None: for ever) and
        "kinds": "count" of tokens and "shares", one row a head.
    """
    batch = task.batch("test", range(min(sequences, task.size("test") or sequences)))
    kinds = _query_kinds(task, batch)
    return {"layers": [_of_layer(seen, kinds) for seen in look(model, batch, config)]}


def _query_kinds(task: Any, batch: Any) -> dict[str, Tensor]:
    """Kinds of tokens, with queries that have a source told apart by lag."""
    kinds = kinds_of(task, batch)
    asked = batch["sources"] >= 0
    if not asked.any():
        return kinds
    kinds.pop("again", None)
    lags = {
        f"lag {name}": asked & (batch["buckets"] == number)
        for number, name in enumerate(task.bucket_names)
    }
    return {**lags, **kinds}


def _of_layer(seen: Look, kinds: dict[str, Tensor]) -> dict[str, Any]:
    shares = seen.read / seen.read.sum(-1, keepdim=True)
    found = {
        name: {"count": int(member.sum()), "shares": shares[member].mean(0).tolist()}
        for name, member in kinds.items()
        if member.any()
    }
    constants = torch.where(seen.rates > 0, 1 / seen.rates, 0).tolist()
    return {"time_constants": [x or None for x in constants], "kinds": found}
