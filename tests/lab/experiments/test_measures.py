"""Measurements on trained models agree with plain evaluation."""

from dataclasses import replace

import pytest

from tests.lab.experiments.tiny import tiny
from vort.lab.experiments.complexity import cost_of_layer
from vort.lab.experiments.measures import by_lag, fine_bounds, heavy_hitters
from vort.lab.experiments.models import build_model
from vort.lab.tasks import make_task
from vort.lab.training import TrainingConfig, evaluate


def made(memory: str = "vort"):
    task = make_task(**tiny().task)
    model = build_model(task, {**tiny().config, "memory": memory}, seed=0)
    return model, task, TrainingConfig(steps=1, batch_size=4, precision="float32")


def test_fine_classes_add_up_to_the_buckets() -> None:
    model, task, config = made()
    found = by_lag(model, task, config)
    plain = evaluate(model, task, "test", batch_size=4)
    assert set(found["test"]) == set(plain)
    for name, scores in plain.items():
        for key, value in scores.items():
            assert found["test"][name][key] == pytest.approx(value, rel=1e-6)


def test_answers_of_every_sequence_add_up_to_the_buckets() -> None:
    model, task, config = made()
    found = by_lag(model, task, config)
    assert list(found["sequences"]) == list(task.bucket_names)
    asked_of_each = [0] * 8
    for name, words in found["sequences"].items():
        right, asked = zip(*(map(int, word.split("/")) for word in words.split()), strict=True)
        assert len(asked) == 8
        assert sum(asked) == found["test"][name]["count"]
        assert sum(right) == pytest.approx(found["test"][name]["accuracy"] * sum(asked))
        asked_of_each = [a + b for a, b in zip(asked_of_each, asked, strict=True)]
    assert asked_of_each == [4] * 8
    # Batches of another size have the same sequences in the same order.
    other = by_lag(model, task, replace(config, evaluation_batch_size=3))
    assert other["sequences"] == found["sequences"]


@pytest.mark.parametrize("length", [10, 1000, 10_000])
def test_bounds_of_the_task_are_among_the_fine_ones(length: int) -> None:
    bounds = fine_bounds(length, (3, 7))
    assert {3, 7} <= set(bounds)
    assert list(bounds) == sorted(set(bounds))
    assert bounds[-1] < length


def test_h2o_with_room_for_all_scores_as_full_attention() -> None:
    model, task, config = made("softmax")
    full = by_lag(model, task, config)
    kept = heavy_hitters(model, task, config, state_numbers=10**6, sequences=8)
    assert kept["test"]["all"]["bits"] == pytest.approx(full["test"]["all"]["bits"], rel=1e-4)
    # Asked as much as every other model, unless it is told otherwise.
    assert kept["test"]["all"]["count"] == full["test"]["all"]["count"]
    model, task, config = made("softmax")
    assert (
        heavy_hitters(model, task, config, state_numbers=10**6)["sequences"] == (full["sequences"])
    )
    model, task, config = made("softmax")
    small = heavy_hitters(model, task, config, state_numbers=500, sequences=8)
    assert small["state_numbers"] <= 500
    assert small["test"]["all"]["bits"] != pytest.approx(full["test"]["all"]["bits"], rel=1e-9)


def test_the_cost_of_a_layer_is_measured_in_a_process_of_its_own() -> None:
    config = {"hidden_size": 32, "num_attention_heads": 1, "sliding_window": 0, "conv_size": 0}
    found = cost_of_layer(config, {"length": 128, "batch": 1, "repeats": 1})
    assert found["times"]["forward_backward"] > 0
    assert found["peak_bytes"] >= 0


def test_what_goes_wrong_in_the_process_of_a_layer_is_said_here() -> None:
    with pytest.raises(RuntimeError, match=r"TypeError: .*hiden_size"):
        cost_of_layer({"hiden_size": 32}, {"length": 8, "batch": 1, "repeats": 1})
