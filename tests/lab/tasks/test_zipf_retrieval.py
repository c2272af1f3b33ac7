"""Zipf retrieval: the stated distributions, and questions that can be answered."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from vort.lab.tasks import IGNORED, ZipfRetrieval


def draws(task: ZipfRetrieval, count: int) -> dict[str, np.ndarray]:
    batch = task.batch("train", range(count))
    rows, queries = (batch["labels"] != IGNORED).nonzero(as_tuple=True)
    sources = batch["sources"][rows, queries].long()
    return {
        "lags": (queries - sources).numpy(),
        "queries": queries.numpy(),
        "sources": sources.numpy(),
        "labels": batch["labels"][rows, queries].numpy(),
        "asked": batch["input_ids"][rows, queries].numpy(),
        "shown": batch["input_ids"][rows, sources].numpy(),
        "rows": rows.numpy(),
    }


def binned(values: np.ndarray, probabilities: np.ndarray, least: float = 20) -> tuple:
    """Counts and expected counts of 0, 1, .., neighbours joined until enough are expected."""
    expected = probabilities * len(values)
    edges, open_mass = [0], 0.0
    for place, mass in enumerate(expected):
        open_mass += mass
        if open_mass >= least:
            edges.append(place + 1)
            open_mass = 0.0
    edges[-1] = len(expected)
    counts = np.bincount(values, minlength=len(expected))
    return tuple(np.add.reduceat(x, edges[:-1]) for x in (counts, expected))


@pytest.mark.parametrize(
    ("length", "beta"), [(40, 1.0), (40, 2.0), (1000, 0.0), (1000, 1.0), (1000, 1.5), (1000, 2.0)]
)
def test_lags_follow_the_power_law(length: int, beta: float) -> None:
    # Few positions and many pairs: were pairs that collide given another lag, this would show.
    task = ZipfRetrieval(length=length, pairs=10, keys=16, beta=beta, bounds=(10,))
    weights = np.arange(1, length, dtype=float) ** -beta
    counts, expected = binned(draws(task, 2000)["lags"] - 1, weights / weights.sum())
    assert chisquare(counts, expected).pvalue > 1e-3


@pytest.mark.parametrize("beta", [1.0, 1.5, 2.0])
def test_lags_follow_the_power_law_at_the_size_of_the_paper(beta: float) -> None:
    weights = np.arange(1, 10_000, dtype=float) ** -beta
    lags = draws(ZipfRetrieval(beta=beta), 300)["lags"]
    counts, expected = binned(lags - 1, weights / weights.sum())
    assert chisquare(counts, expected).pvalue > 1e-3


@given(data=st.data(), length=st.integers(8, 400), beta=st.floats(0, 4), seed=st.integers(0, 99))
def test_any_setting_gives_questions_that_can_be_answered(
    data: st.DataObject, length: int, beta: float, seed: int
) -> None:
    pairs = data.draw(st.integers(1, max(1, length // 8)))
    task = ZipfRetrieval(length=length, pairs=pairs, beta=beta, seed=seed)
    found, words = draws(task, 2), task.vocabulary
    assert len(found["lags"]) == 2 * pairs
    keys = found["asked"] - words.query(0)
    assert np.array_equal(found["shown"], words.anchor(keys, found["labels"]))


def test_anchors_are_uniform_among_positions_that_fit() -> None:
    task = ZipfRetrieval(length=200, pairs=2, keys=16, beta=1.0)
    found = draws(task, 5000)
    for lag in (1, 2, 5):
        anchors = found["sources"][found["lags"] == lag]
        counts, expected = binned(anchors, np.full(200 - lag, 1 / (200 - lag)))
        assert chisquare(counts, expected).pvalue > 1e-3


@pytest.mark.parametrize("queries", ["sparse", "dense"])
def test_labels_are_uniform_and_keys_too(queries: str) -> None:
    task = ZipfRetrieval(length=200, pairs=20, keys=256, queries=queries)
    words, batch = task.vocabulary, task.batch("train", range(600))
    first, last = words.anchor(0, 0), words.query(0)
    tokens = batch["input_ids"]
    anchors = tokens[(tokens >= first) & (tokens < last)].numpy() - first
    assert chisquare(np.bincount(anchors % 16, minlength=16)).pvalue > 1e-3
    assert chisquare(np.bincount(anchors // 16, minlength=256)).pvalue > 1e-3


def test_fillers_are_uniform() -> None:
    task = ZipfRetrieval(length=500, pairs=4, fillers=10)
    tokens = task.batch("train", range(50))["input_ids"].flatten().numpy()
    fillers = tokens[tokens >= task.vocabulary.filler(0)] - task.vocabulary.filler(0)
    assert chisquare(np.bincount(fillers, minlength=10)).pvalue > 1e-3


@pytest.mark.parametrize("queries", ["sparse", "dense"])
def test_the_source_shows_the_key_that_is_asked_for_and_its_label(queries: str) -> None:
    task = ZipfRetrieval(length=400, pairs=50, queries=queries)
    found, words = draws(task, 50), task.vocabulary
    keys = found["asked"] - words.query(0)
    assert (found["sources"] < found["queries"]).all()
    assert np.array_equal(found["shown"], words.anchor(keys, found["labels"]))


@pytest.mark.parametrize("queries", ["sparse", "dense"])
def test_every_key_is_shown_once(queries: str) -> None:
    task = ZipfRetrieval(length=400, pairs=50, queries=queries)
    words = task.vocabulary
    for tokens in task.batch("train", range(50))["input_ids"]:
        anchors = tokens[(tokens >= words.anchor(0, 0)) & (tokens < words.query(0))]
        keys = (anchors - words.anchor(0, 0)) // task.labels
        assert len(keys.unique()) == len(keys) == task.anchors


def test_pairs_never_collide_even_in_full_sequences() -> None:
    task = ZipfRetrieval(length=400, pairs=100, beta=0.5)
    batch = task.batch("train", range(100))
    assert ((batch["labels"] != IGNORED).sum(1) == 100).all()
    assert (task.vocabulary.shows_key(batch["input_ids"]).sum(1) == 200).all()


@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_dense_lags_follow_the_power_law_over_the_odd_lags_that_fit(beta: float) -> None:
    task = ZipfRetrieval(length=100, queries="dense", beta=beta)
    found = draws(task, 4000)
    for query in (3, 21, 99):
        lags = found["lags"][found["queries"] == query]
        weights = np.arange(1, query + 1, 2, dtype=float) ** -beta
        counts, expected = binned((lags - 1) // 2, weights / weights.sum())
        assert chisquare(counts, expected).pvalue > 1e-3


def test_dense_has_a_query_at_every_odd_position() -> None:
    batch = ZipfRetrieval(length=101, queries="dense").batch("train", [0])
    asked = (batch["labels"] != IGNORED)[0].nonzero().flatten()
    assert torch.equal(asked, torch.arange(1, 100, 2))


def test_the_papers_setting_is_the_default() -> None:
    task = ZipfRetrieval()
    assert (task.length, task.pairs, task.labels, task.beta) == (10_000, 64, 16, 1.0)
    assert [task.size(split) for split in ("train", "test")] == [5000, 1000]
    assert task.bucket_names == ("<=100", "100-1000", ">1000")
    assert task.vocab_size == 16 + 256 * 16 + 256 + 64
