"""Multi-query associative recall: pairs first, then each key once."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from vort.lab.tasks import IGNORED, MQAR


@pytest.mark.parametrize("gaps", ["uniform", "power_law"])
def test_each_key_is_asked_for_once_after_all_pairs(gaps: str) -> None:
    task = MQAR(length=100, pairs=20, vocabulary=200, gaps=gaps)
    batch = task.batch("train", range(50))
    for tokens, labels, sources in zip(
        batch["input_ids"], batch["labels"], batch["sources"], strict=True
    ):
        queries = (labels != IGNORED).nonzero().flatten()
        assert len(queries) == 20
        assert (queries >= 40).all()
        assert sorted(tokens[queries].tolist()) == sorted(tokens[0:40:2].tolist())
        where = sources[queries].long()
        assert (tokens[where] == labels[queries]).all()
        assert (tokens[where - 1] == tokens[queries]).all()


def test_no_key_shows_up_that_is_not_asked_for() -> None:
    task = MQAR(length=100, pairs=20, vocabulary=200)
    batch = task.batch("train", range(50))
    keys = (batch["input_ids"] >= task.num_classes).sum(1)
    assert (keys == 40).all()


def test_uniform_gaps_are_uniform_and_independent_of_the_pair() -> None:
    task = MQAR(length=60, pairs=10, vocabulary=64, gaps="uniform")
    batch = task.batch("train", range(3000))
    rows, queries = (batch["labels"] != IGNORED).nonzero(as_tuple=True)
    assert chisquare(np.bincount(queries.numpy() - 20, minlength=40)).pvalue > 1e-3
    first = batch["sources"][rows, queries] == 1
    assert chisquare(np.bincount(queries[first].numpy() - 20, minlength=40)).pvalue > 1e-3


@pytest.mark.parametrize("power", [0.01, 0.5])
def test_a_single_gap_follows_the_power_law(power: float) -> None:
    task = MQAR(length=42, pairs=1, vocabulary=64, power=power, train_sequences=None)
    batch = task.batch("train", range(6000))
    gaps = (batch["labels"] != IGNORED).nonzero()[:, 1].numpy() - 2
    weights = np.arange(1, 41) ** (power - 1.0)
    assert chisquare(np.bincount(gaps, minlength=40), 6000 * weights / weights.sum()).pvalue > 1e-3


def test_power_one_is_uniform() -> None:
    task = MQAR(length=60, pairs=10, vocabulary=64, power=1.0)
    gaps = (task.batch("train", range(3000))["labels"] != IGNORED).nonzero()[:, 1].numpy() - 20
    assert chisquare(np.bincount(gaps, minlength=40)).pvalue > 1e-3


def test_power_law_gaps_are_mostly_short() -> None:
    lags = {}
    for gaps in ("uniform", "power_law"):
        batch = MQAR(length=256, pairs=8, gaps=gaps).batch("train", range(100))
        lags[gaps] = (batch["labels"] != IGNORED).nonzero()[:, 1].float().median().item()
    assert lags["power_law"] < lags["uniform"] / 2


def test_mixed_sizes_are_scored_apart_and_end_where_they_say() -> None:
    mixed = ((16, 2), (64, 20))
    task = MQAR(length=64, vocabulary=64, mixed=mixed, train_sequences=None)
    assert task.bucket_names == ("2 in 16", "20 in 64")
    batch = task.batch("test", range(4))
    asked = batch["labels"] != IGNORED
    assert asked.sum(1).tolist() == [2, 20, 2, 20]
    assert (asked[::2].nonzero()[:, 1] < 16).all()
    assert batch["buckets"][asked].tolist() == [0, 0] + [1] * 20 + [0, 0] + [1] * 20
    train = task.batch("train", range(40))
    counts = (train["labels"] != IGNORED).sum(1)
    assert set(counts.tolist()) == {2, 20}
    with pytest.raises(ValueError, match="pairs must lie in"):
        MQAR(length=64, mixed=((64, 30),))
    with pytest.raises(ValueError, match="lengths be at most 64"):
        MQAR(length=64, mixed=((128, 4),))


def test_sequences_apart_share_a_setting_and_end_with_it() -> None:
    mixed = ((32, 2), (64, 8), (128, 16))
    task = MQAR(length=128, vocabulary=64, mixed=mixed, apart=4, train_sequences=None)
    seen = set()
    for first in range(0, 40, 4):
        batch = task.batch("train", range(first, first + 4))
        length, pairs = mixed[int(batch["buckets"].max())]
        assert batch["input_ids"].shape == (4, length)
        assert ((batch["labels"] >= 0).sum(1) == pairs).all()
        seen.add(length)
    assert seen == {32, 64, 128}
    assert task.batch("test", range(3))["input_ids"].shape == (3, 128)
    alone = task.batch("train", [5])["input_ids"]
    assert torch.equal(alone[0], task.batch("train", range(4, 8))["input_ids"][1])
    with pytest.raises(ValueError, match="apart must be at least 1, or None, got 0"):
        MQAR(length=128, apart=0)


def test_sequences_of_a_seed_stay_what_they_were() -> None:
    """Results of committed cells rest on them; the same on every processor."""
    task = MQAR(length=16, pairs=4, vocabulary=16, mixed=((8, 2), (16, 4)))
    found = [task.batch(split, [1])["input_ids"][0].tolist() for split in ("train", "test")]
    assert found == [
        [12, 7, 14, 1, 15, 3, 8, 5, 12, 8, 15, 7, 1, 7, 5, 14],
        [11, 6, 10, 5, 15, 2, 13, 1, 15, 10, 11, 6, 4, 13, 0, 5],
    ]
