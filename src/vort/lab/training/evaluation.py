"""Scores of a model on a split, by bucket."""

from typing import Any

import torch
from torch import nn

from vort.lab.tasks import Split, Task
from vort.lab.training.data import load
from vort.lab.training.metrics import BucketMeter, Metrics
from vort.lab.training.scoring import Scorer

__all__ = ["evaluate"]


@torch.no_grad()
def evaluate(
    model: nn.Module,
    task: Task,
    split: Split = "test",
    *,
    sequences: int | None = None,
    batch_size: int = 16,
    workers: int = 0,
    accelerator: Any = None,
) -> Metrics:
    """Accuracy, bits and count for each bucket of the task, and for "all".

    Args:
        model: as for `train`; it must give logits.
        task: where the questions come from.
        split: "validation" or "test"; "train" works too, for what it is worth.
        sequences: how many of the split, from its start; None: all.
        batch_size: sequences at a time.
        workers: processes that draw sequences.
        accelerator: Accelerate's, where several processes share the work; else the model's own
            device does all of it.
    """
    scorer = model if isinstance(model, Scorer) else Scorer(model, task.num_classes)
    device = next(scorer.parameters()).device
    rank, processes = (0, 1)
    if accelerator is not None:
        rank, processes = accelerator.process_index, accelerator.num_processes
    count = _count(task, split, sequences)
    mine = range(rank, count, processes)
    groups = [list(mine[first : first + batch_size]) for first in range(0, len(mine), batch_size)]
    meter = BucketMeter(task.bucket_names, device)
    # The model is asked, not the scorer: one made here is new and knows nothing of it.
    training = model.training
    scorer.eval()
    for batch in load(task, split, groups, device, workers):
        scores = scorer(batch)
        if "logits" not in scores:
            raise TypeError("model must give logits to be evaluated, got a loss alone")
        meter.add(scores["logits"], batch["targets"], batch["buckets"])
    scorer.train(training)
    if processes > 1:
        meter.sums = accelerator.reduce(meter.sums, reduction="sum")
    return meter.metrics()


def _count(task: Task, split: Split, sequences: int | None) -> int:
    size = task.size(split)
    if sequences is not None and sequences < 1:
        raise ValueError(f"sequences must be at least 1, or None for all, got {sequences}")
    if size is None and sequences is None:
        raise ValueError(f"sequences must be given: the split {split!r} has no end")
    return min(x for x in (size, sequences) if x is not None)
