"""Label copy: labels at first mentions, uniform positions."""

import numpy as np
from scipy.stats import chisquare, kstest

from vort.lab.tasks import IGNORED, LabelCopy


def test_only_the_first_mention_shows_the_label() -> None:
    task = LabelCopy(length=2000)
    words = task.vocabulary
    for tokens in task.batch("train", range(20))["input_ids"]:
        mentions = words.shows_key(tokens).nonzero().flatten()
        seen: dict[int, int] = {}
        for token in tokens[mentions].tolist():
            if token < words.query(0):
                key = (token - words.anchor(0, 0)) // task.labels
                assert key not in seen
                seen[key] = 0
            else:
                seen[token - words.query(0)] += 1
        assert len(seen) == 20
        assert set(seen.values()) == {10}


def test_the_label_asked_for_is_the_one_at_the_source() -> None:
    task = LabelCopy(length=1000)
    batch, words = task.batch("test", range(20)), task.vocabulary
    rows, queries = (batch["labels"] != IGNORED).nonzero(as_tuple=True)
    sources = batch["sources"][rows, queries].long()
    keys = batch["input_ids"][rows, queries] - words.query(0)
    labels = batch["labels"][rows, queries]
    shown = batch["input_ids"][rows, sources]
    assert (sources < queries).all()
    assert np.array_equal(shown.numpy(), words.anchor(keys.numpy(), labels.numpy()))


def test_mentions_are_uniform_over_positions_and_labels_over_classes() -> None:
    task = LabelCopy(length=500, entities=10, mentions=5)
    batch = task.batch("train", range(800))
    mentions = batch["entity_mask"].sum(0).numpy()
    assert chisquare(mentions).pvalue > 1e-3
    anchors = batch["input_ids"][batch["input_ids"] < task.vocabulary.query(0)]
    labels = (anchors.numpy() - task.vocabulary.anchor(0, 0)) % task.labels
    assert chisquare(np.bincount(labels, minlength=16)).pvalue > 1e-3


def test_first_mentions_are_the_least_of_uniform_positions() -> None:
    task = LabelCopy(length=5000, entities=1, mentions=3)
    sources = task.batch("train", range(1500))["sources"].amax(1).numpy()
    # P(least of 4 uniform numbers > x) = (1 - x)^4.
    assert kstest(sources / 5000, lambda x: 1 - (1 - x) ** 4).pvalue > 1e-3


def test_the_entity_mask_is_at_mentions_alone() -> None:
    task = LabelCopy(length=500, entities=5, mentions=3)
    batch = task.batch("train", range(5))
    assert (batch["entity_mask"].sum(1) == 20).all()
    assert (batch["entity_mask"][batch["labels"] != IGNORED] == 1).all()


def test_the_papers_setting_is_the_default() -> None:
    task = LabelCopy()
    assert (task.length, task.entities, task.names, task.labels) == (8000, 20, 256, 16)
    assert task.bucket_names == ("<=200", "200-2000", ">2000")
