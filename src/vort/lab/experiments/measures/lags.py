"""Test scores by lag, in classes finer than the task's."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vort.lab.experiments.measures.precision import precision_of
from vort.lab.training import evaluate
from vort.lab.training.metrics import Metrics

__all__ = ["by_lag", "fine_bounds"]


def by_lag(model: Any, task: Any, config: Any, *, sequences: int | None = None) -> dict[str, Any]:
    """Test scores by the task's buckets, and `lags`: accuracy in about five classes a decade.

    sequences: how many of the test split; as the config says by default.
    """
    fine = replace(task, bounds=fine_bounds(task.length, task.bounds))
    size = config.evaluation_batch_size or config.batch_size
    count = config.test_sequences if sequences is None else sequences
    with precision_of(config):
        scores = evaluate(model, fine, "test", sequences=count, batch_size=size)
    limits = [0, *fine.bounds, task.length]
    lags = [
        {"low": low + 1, "high": high, **scores[name]}
        for name, low, high in zip(fine.bucket_names, limits[:-1], limits[1:], strict=True)
        if name in scores
    ]
    return {"test": merge(lags, task), "lags": lags}


def fine_bounds(length: int, kept: Sequence[int]) -> tuple[int, ...]:
    """Upper ends of lag classes, evenly spaced in the logarithm, the given ones among them.

    >>> fine_bounds(100, (30,))
    (1, 2, 3, 4, 6, 10, 16, 25, 30, 40, 63)
    """
    count = int(np.log10(max(length, 2)) * 5)
    even = {round(10 ** (i / 5)) for i in range(count + 1)}
    return tuple(sorted(x for x in even | set(kept) if x < length))


def merge(lags: Sequence[dict[str, Any]], task: Any) -> Metrics:
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
