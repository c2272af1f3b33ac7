"""Scores by bucket: of a model on a split, and what several seeds say together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log, sqrt
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from vort.lab.tasks import Split, Task
from vort.lab.training.data import load
from vort.lab.training.scorer import Scorer

__all__ = ["BucketMeter", "Interval", "Metrics", "evaluate", "interval"]

# Bucket -> accuracy, bits (per label: per character in ASCII text) and count.
Metrics = dict[str, dict[str, float]]


class BucketMeter:
    """Accuracy and bits for each label, summed up by bucket.

    >>> meter = BucketMeter(("near", "far"))
    >>> logits = torch.tensor([[9.0, 0.0], [9.0, 0.0], [0.0, 9.0]])
    >>> meter.add(logits, torch.tensor([0, 1, 1]), torch.tensor([0, 1, 1]))
    >>> {name: values["accuracy"] for name, values in meter.metrics().items()}
    {'near': 1.0, 'far': 0.5, 'all': 0.6666666666666666}
    """

    def __init__(self, names: Sequence[str], device: torch.device | str = "cpu") -> None:
        self.names = tuple(names)
        # Columns: labels, right answers, nats.
        self.sums = torch.zeros(len(names), 3, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, logits: Tensor, targets: Tensor, buckets: Tensor) -> None:
        """Take in logits `[N, C]` with their labels and buckets `[N]`."""
        nats = nn.functional.cross_entropy(logits.float(), targets, reduction="none")
        right = logits.argmax(-1) == targets
        columns = torch.stack([torch.ones_like(nats), right.to(nats.dtype), nats], 1)
        # A product with an indicator, not index_add: its sums come in a fixed order on a GPU too.
        member = buckets == torch.arange(len(self.names), device=buckets.device)[:, None]
        self.sums += member.double() @ columns.double()

    def metrics(self) -> Metrics:
        """For each bucket, and for "all": accuracy, bits and count; nothing for empty buckets."""
        rows = [*zip(self.names, self.sums.tolist(), strict=True)]
        if self.names != ("all",):
            rows.append(("all", self.sums.sum(0).tolist()))
        return {
            name: {"accuracy": right / count, "bits": nats / count / log(2), "count": count}
            for name, (count, right, nats) in rows
            if count
        }


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
    together: bool = False,
    seen: Callable[[Mapping[str, Tensor], Tensor], None] | None = None,
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
        together: whether processes must go through as many batches each, as where weights are
            shared out; what is too many is not counted.
        seen: is shown every batch, as `load` makes it, with its logits `[N, C]`.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    scorer = model if isinstance(model, Scorer) else Scorer(model, task.num_classes)
    device = next(scorer.parameters()).device
    rank, processes = (0, 1)
    if accelerator is not None:
        rank, processes = accelerator.process_index, accelerator.num_processes
    count = _count(task, split, sequences)
    mine = range(rank, count, processes)
    groups = [list(mine[first : first + batch_size]) for first in range(0, len(mine), batch_size)]
    mine_alone = len(groups)
    if together:
        most = -(-len(range(0, count, processes)) // batch_size)
        groups += [[0]] * (most - len(groups))
    meter = BucketMeter(task.bucket_names, device)
    # The model is asked, not the scorer: one made here is new and knows nothing of it.
    training = model.training
    scorer.eval()
    for number, batch in enumerate(load(task, split, groups, device, workers)):
        scores = scorer(batch)
        if number >= mine_alone:
            continue
        if "logits" not in scores:
            raise TypeError("model must give logits to be evaluated, got a loss alone")
        meter.add(scores["logits"], batch["targets"], batch["buckets"])
        if seen is not None:
            seen(batch, scores["logits"])
    scorer.train(training)
    if processes > 1:
        meter.sums = accelerator.reduce(meter.sums, reduction="sum")
    return meter.metrics()


def _count(task: Task, split: Split, sequences: int | None) -> int:
    size = task.size(split)
    if sequences is not None and sequences < 1:
        raise ValueError(f"sequences must be at least 1 (absent: all), got {sequences}")
    if size is None and sequences is None:
        raise ValueError(f"sequences must be given: the split {split!r} has no end")
    return min(x for x in (size, sequences) if x is not None)


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and half the width of its confidence interval (NaN for one seed)."""

    mean: float
    half: float
    count: int

    @property
    def low(self) -> float:
        """Lower end."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """Upper end."""
        return self.mean + self.half

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON: no NaN in it."""
        half = None if self.count < 2 else self.half
        return {"mean": self.mean, "half": half, "count": self.count}


def interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Mean of independent runs with its interval from Student's t distribution.

    >>> found = interval([1.0, 2.0, 3.0])
    >>> found.mean, round(found.half, 3)
    (2.0, 2.484)
    """
    if not values:
        raise ValueError("values must hold at least one number, got none")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie in (0, 1), got {confidence}")
    count = len(values)
    if count == 1:
        return Interval(float(values[0]), float("nan"), 1)
    from scipy.stats import t

    factor = float(t.ppf((1 + confidence) / 2, count - 1))
    return Interval(fmean(values), factor * stdev(values) / sqrt(count), count)
