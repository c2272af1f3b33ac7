"""Random numbers by name."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from vort.lab.tasks.streams import SPLITS, stream, uniform_below

indices = st.integers(0, 2**63 - 1)


@given(seed=st.integers(0, 2**64 - 1), index=indices, split=st.sampled_from(SPLITS))
def test_same_name_gives_same_numbers(seed: int, index: int, split: str) -> None:
    first, second = (stream(seed, "task", split, index).random(8) for _ in range(2))
    assert np.array_equal(first, second)


@given(index=indices)
def test_splits_seeds_tasks_and_indices_have_streams_of_their_own(index: int) -> None:
    names = [
        *[(0, "task", split, index) for split in SPLITS],
        (1, "task", "train", index),
        (0, "other", "train", index),
        (0, "task", "train", index + 1),
    ]
    draws = np.stack([stream(*name).random(8) for name in names])
    assert len(np.unique(draws)) == draws.size


def test_uniform_below_is_uniform_for_bounds_that_are_no_power_of_two() -> None:
    draws = uniform_below(stream(0, "task", "train", 0), 7, 70_001)
    assert draws.shape == (70_001,)
    assert chisquare(np.bincount(draws, minlength=7)).pvalue > 1e-3


def test_errors_name_what_was_given() -> None:
    with pytest.raises(ValueError, match=r"split must be one of .*, got 'dev'"):
        stream(0, "task", "dev", 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"seed must lie in .*, got -1"):
        stream(-1, "task", "train", 0)
