"""Scores by bucket against direct computation, and intervals over seeds."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vort.lab.training import BucketMeter, interval


@given(count=st.integers(1, 40), cut=st.integers(0, 40))
def test_metrics_are_means_over_labels_whatever_the_batches(count: int, cut: int) -> None:
    logits, targets = torch.randn(count, 5), torch.randint(5, (count,))
    buckets = torch.randint(3, (count,))
    meter = BucketMeter(("near", "middle", "far"))
    for part in (slice(0, cut), slice(cut, None)):
        meter.add(logits[part], targets[part], buckets[part])
    found = meter.metrics()
    bits = -logits.double().log_softmax(-1)[torch.arange(count), targets] / math.log(2)
    right = (logits.argmax(-1) == targets).double()
    for number, name in enumerate(("near", "middle", "far")):
        member = buckets == number
        if not member.any():
            assert name not in found
            continue
        assert found[name]["count"] == member.sum()
        assert found[name]["bits"] == pytest.approx(bits[member].mean().item(), rel=1e-5)
        assert found[name]["accuracy"] == pytest.approx(right[member].mean().item())
    assert found["all"]["accuracy"] == pytest.approx(right.mean().item())


def test_intervals_are_those_of_student() -> None:
    # Three seeds: the 97.5 % quantile of t with 2 degrees of freedom is 4.3027.
    found = interval([0.5, 0.6, 0.7])
    assert found.mean == pytest.approx(0.6)
    assert found.half == pytest.approx(4.3027 * 0.1 / math.sqrt(3), rel=1e-4)
    assert (found.low, found.high) == (found.mean - found.half, found.mean + found.half)


def test_intervals_hold_the_mean_as_often_as_they_say() -> None:
    draws = np.random.default_rng(0).normal(size=(2000, 4))
    inside = [found.low <= 0 <= found.high for found in map(interval, draws.tolist())]
    assert abs(np.mean(inside) - 0.95) < 0.015


def test_one_seed_has_a_mean_and_no_interval() -> None:
    found = interval([0.5])
    assert found.mean == 0.5
    assert math.isnan(found.half)
    assert found.to_dict() == {"mean": 0.5, "half": None, "count": 1}


def test_no_values_are_an_error() -> None:
    with pytest.raises(ValueError, match="values must hold at least one"):
        interval([])
