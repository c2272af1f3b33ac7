"""What is measured on a trained model besides the scores of training itself."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vort.lab.training.metrics import Metrics, evaluate
from vort.lab.training.setup import uses_bf16

__all__ = [
    "by_lag",
    "extras_of",
    "fine_bounds",
    "heavy_hitters",
    "orders_by_kind",
    "precision_of",
]

_BINS = 40
# Sequences that are decoded side by side, on a GPU and elsewhere: of few of them a token takes as
# long as of many.
_TOGETHER = {True: 250, False: 48}


def precision_of(config: Any) -> Any:
    """The autocast that a model was trained under, for scoring it outside the training loop."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.autocast(device, torch.bfloat16) if uses_bf16(config) else nullcontext()


def extras_of(model: Any, batch: Any, device: torch.device) -> dict[str, Tensor]:
    """What else a model is told of a batch: who is an entity, where it asks and the task knows."""
    if "entity_mask" not in batch or not model.base_model.needs_entity:
        return {}
    return {"entity_mask": batch["entity_mask"].to(device)}


def by_lag(model: Any, task: Any, config: Any, *, sequences: int | None = None) -> dict[str, Any]:
    """Test scores by the task's buckets, and `lags`: accuracy in about five classes a decade.

    `sequences` has right answers and questions of every sequence, by bucket: two models that were
    asked the same are compared by them, see `vort.lab.experiments.scores`.

    sequences: how many of the test split; as the config says by default.
    """
    fine = replace(task, bounds=fine_bounds(task.length, task.bounds))
    size = config.evaluation_batch_size or config.batch_size
    count = config.test_sequences if sequences is None else sequences
    answers = _Answers(fine, task)
    with precision_of(config):
        scores = evaluate(model, fine, "test", sequences=count, batch_size=size, seen=answers.take)
    limits = [0, *fine.bounds, task.length]
    lags = [
        {"low": low + 1, "high": high, **scores[name]}
        for name, low, high in zip(fine.bucket_names, limits[:-1], limits[1:], strict=True)
        if name in scores
    ]
    return {"test": _merge(lags, task), "lags": lags, "sequences": answers.to_dict()}


class _Answers:
    """Right answers and questions of each sequence, by the buckets of a task.

    fine: the task with finer classes, which batches come in; their bounds hold all of the other's.
    """

    def __init__(self, fine: Any, task: Any) -> None:
        bounds = [*fine.bounds, fine.length]
        # Of each fine class, the bucket that it is part of.
        self.buckets = torch.tensor([int(np.searchsorted(task.bounds, high)) for high in bounds])
        self.names = tuple(task.bucket_names)
        self.counts: list[Tensor] = []

    def take(self, batch: Mapping[str, Tensor], logits: Tensor) -> None:
        """Take in a batch with the logits of its questions."""
        rows, length = batch["input_ids"].shape
        bucket = self.buckets[batch["buckets"].cpu()]
        place = batch["positions"].cpu() // length * len(self.names) + bucket
        right = (logits.argmax(-1) == batch["targets"]).cpu()
        size = rows * len(self.names)
        both = [torch.bincount(place[right], minlength=size), torch.bincount(place, minlength=size)]
        self.counts.append(torch.stack(both).view(2, rows, len(self.names)))

    def to_dict(self) -> dict[str, str]:
        """For each bucket a text: "right/asked" of one sequence after another."""
        right, asked = torch.cat(self.counts, 1).tolist()
        return {
            name: " ".join(f"{r[n]}/{a[n]}" for r, a in zip(right, asked, strict=True))
            for n, name in enumerate(self.names)
        }


def fine_bounds(length: int, kept: Sequence[int]) -> tuple[int, ...]:
    """Upper ends of lag classes, evenly spaced in the logarithm, the given ones among them.

    >>> fine_bounds(100, (30,))
    (1, 2, 3, 4, 6, 10, 16, 25, 30, 40, 63)
    """
    count = int(np.log10(max(length, 2)) * 5)
    even = {round(10 ** (i / 5)) for i in range(count + 1)}
    return tuple(sorted(x for x in even | set(kept) if x < length))


def _merge(lags: Sequence[dict[str, Any]], task: Any) -> Metrics:
    """Scores by the task's own buckets, from those by finer classes."""
    found: Metrics = {}
    limits = [0, *task.bounds, task.length]
    parts = {
        name: [lag for lag in lags if low < lag["high"] <= high]
        for name, low, high in zip(task.bucket_names, limits[:-1], limits[1:], strict=True)
    }
    for name, members in {**parts, "all": list(lags)}.items():
        count = sum(lag["count"] for lag in members)
        if count:
            found[name] = {
                key: sum(lag[key] * lag["count"] for lag in members) / count
                for key in ("accuracy", "bits")
            } | {"count": count}
    return found


def heavy_hitters(
    model: Any, task: Any, config: Any, *, state_numbers: int, sequences: int | None = None
) -> dict[str, Any]:
    """Test scores of a softmax model under H2O's cache policy, its state as large as given.

    Args:
        model: it is changed.
        task: as trained on.
        config: of the training.
        state_numbers: what decoding may keep for one sequence and layer; as many tokens as fit.
        sequences: of the test split; as many as every other model is asked by default.
    """
    size = 0
    for block in model.model.layers:
        memory = block.self_attn.memory
        per_token = memory.num_heads * (2 * memory.head_dim + 2)
        budget = max(2, state_numbers // per_token)
        memory.keep_heavy_hitters(budget)
        size += memory.state_size()
    together = config.evaluation_batch_size or config.batch_size
    together = max(together, _TOGETHER[torch.cuda.is_available()])
    config = replace(config, evaluation_batch_size=together)
    found = by_lag(model, task, config, sequences=sequences)
    return {**found, "budget": budget, "state_numbers": size}


@torch.no_grad()
def orders_by_kind(model: Any, task: Any, config: Any) -> dict[str, Any]:
    """How orders are distributed over kinds of tokens: mean, spread and histogram on [0, 1].

    Kinds are those of `Task.kinds`.
    """
    device = next(model.parameters()).device
    model.eval()
    batch = task.batch("test", range(min(4, task.size("test") or 4)))
    ids = batch["input_ids"].to(device)
    with precision_of(config):
        extras = extras_of(model, batch, device)
        layers = model.model(ids, use_cache=False, output_orders=True, **extras).orders
    kinds = task.kinds(batch)
    return {
        "bins": _BINS,
        "layers": [
            {name: _distribution(order.float().cpu()[member]) for name, member in kinds.items()}
            for order in layers
            if order is not None
        ],
    }


def _distribution(orders: Tensor) -> dict[str, Any]:
    if not orders.numel():
        return {"count": 0}
    histogram = torch.histc(orders, _BINS, 0.0, 1.0)
    return {
        "count": int(orders.shape[0]),
        "mean": orders.mean().item(),
        "deviation": orders.std(correction=0).item(),
        "heads": orders.mean(0).tolist(),
        "histogram": (histogram / histogram.sum()).tolist(),
    }
