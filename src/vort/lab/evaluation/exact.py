"""Answers of several tokens that are right only if all of them are."""

from typing import Any

import torch
from torch import nn

from vort.lab.tasks import Split, Task, answers_right
from vort.lab.training.data import compact
from vort.lab.training.scorer import Scorer

__all__ = ["exact_matches"]


@torch.no_grad()
def exact_matches(
    model: nn.Module,
    task: Task,
    split: Split = "test",
    *,
    sequences: int | None = None,
    batch_size: int = 8,
) -> dict[str, dict[str, float]]:
    """Share of answers that are right whole, by bucket and for "all"; and of sequences.

    A sequence is right if all its answers are. Answers are compared given what stands before each
    of their tokens: a model that writes by itself gets exactly these right, up to its first error.
    """
    size = task.size(split)
    count = min(x for x in (sequences, size, 1000 if size is None else size) if x is not None)
    if count < 1 or batch_size < 1:
        raise ValueError(f"sequences and batch_size must be at least 1, got {count}, {batch_size}")
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    scorer = Scorer(model, task.num_classes)
    buckets: dict[int, list[int]] = {}
    rows: list[bool] = []
    for begin in range(0, count, batch_size):
        indices = range(begin, min(begin + batch_size, count))
        batch = task.batch(split, indices)
        small = compact(batch)
        given: dict[str, Any] = {name: x.to(device) for name, x in small.items()}
        best = scorer(given)["logits"].argmax(-1).cpu()
        predicted = torch.full_like(batch["labels"], -1)
        predicted.view(-1)[small["positions"]] = best
        found = answers_right(batch, predicted)
        for bucket, right in found[:, 1:].tolist():
            buckets.setdefault(bucket, []).append(right)
        rows += [bool(found[found[:, 0] == row, 2].all()) for row in range(len(indices))]
    model.train(training)
    named = {task.bucket_names[bucket]: buckets[bucket] for bucket in sorted(buckets)}
    named["all"] = [right for found in buckets.values() for right in found]
    named["sequences"] = [int(right) for right in rows]
    return {
        name: {"exact": sum(right) / len(right), "count": float(len(right))}
        for name, right in named.items()
    }
