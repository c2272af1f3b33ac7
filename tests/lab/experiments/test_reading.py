"""Reading far: bits by class and window, the same as a plain forward, compared in pairs."""

from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vort.lab.experiments.models import build_model
from vort.lab.experiments.reading import (
    Reading,
    between_classes,
    class_names,
    differences,
    read_on,
    readings,
)
from vort.lab.tasks import make_task
from vort.lab.training import TrainingConfig
from vort.lab.verdicts import judge_lead

CONFIG = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "sliding_window": 8,
    "num_scales": 4,
    "horizon": 1000,
    "tie_word_embeddings": False,
}
TRAINING = TrainingConfig(steps=1, batch_size=4, precision="float32")
BOUNDS = (16, 64)


def made(shelf: Path, **changes: Any) -> tuple[Any, Any]:
    task = make_task("books", source=str(shelf), length=32, bounds=(16,), validation_files=1)
    return build_model(task, {**CONFIG, **changes}, seed=0), task


def test_classes_are_called_by_where_they_end() -> None:
    assert class_names(100, BOUNDS) == ("<16", "-64", "-100")
    assert class_names(64, BOUNDS) == ("<16", "-64")
    assert class_names(10, BOUNDS) == ("<10",)
    names = class_names(131072)
    assert (names[0], names[-2], names[-1], len(names)) == ("<256", "-65536", "-131072", 9)


@torch.no_grad()
def test_bits_of_a_window_are_those_of_a_plain_forward(shelf: Path) -> None:
    model, task = made(shelf)
    kept = read_on(model, task, TRAINING, lengths=(32, 200), bounds=BOUNDS, most={"32": 2})
    found = readings({"reading": kept})
    assert list(found) == [(32, None), (200, None)]
    far = found[200, None]
    assert far.classes == ("<16", "-64", "-200", "all")
    # Books too short have none; others have windows side by side.
    assert list(far.windows) == [
        (1, 0),
        (2, 0),
        (2, 200),
        (2, 400),
        *((3, 200 * n) for n in range(12)),
    ]
    assert [place for place in found[32, None].windows if place[0] == 3] == [(3, 0), (3, 1248)]
    text = (shelf / "test" / "2.txt").read_bytes()[200:401]
    ids = torch.tensor([list(text)])
    logits = model.eval()(ids[:, :-1]).logits[0]
    bits = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none") / log(2)
    wanted = [bits[:16].mean(), bits[16:64].mean(), bits[64:].mean(), bits.mean()]
    assert far.windows[2, 200].tolist() == pytest.approx([x.item() for x in wanted], abs=1e-4)


def test_a_model_with_a_horizon_is_read_twice_and_left_as_it_was(shelf: Path) -> None:
    for changes in ({}, {"layer_memories": ["vort", "softmax"]}):
        model, task = made(shelf, **changes)
        before = {name: x.clone() for name, x in model.state_dict().items()}
        kept = read_on(model, task, TRAINING, lengths=(32, 1024), bounds=BOUNDS)
        assert [(r["length"], r["horizon"]) for r in kept["readings"]] == [
            (32, None),
            (1024, None),
            (1024, 1024),
        ]
        assert model.config.horizon == 1000
        assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
        again = read_on(model, task, TRAINING, lengths=(1024,), bounds=BOUNDS)
        assert again["readings"] == kept["readings"][1:]


@pytest.mark.parametrize("memory", ["gla", "mamba2", "gated_delta", "softmax", "none"])
def test_other_memories_are_read_once(shelf: Path, memory: str) -> None:
    model, task = made(shelf, memory=memory)
    kept = read_on(model, task, TRAINING, lengths=(1024,), bounds=BOUNDS, documents=4)
    assert [(r["length"], r["horizon"], len(r["windows"])) for r in kept["readings"]] == [
        (1024, None, 2)
    ]


def of(windows: dict[tuple[int, int], list[float]]) -> Reading:
    rows = {place: np.array(bits) for place, bits in windows.items()}
    return Reading(100, None, ("<16", "all"), rows)


def test_differences_are_paired_by_window_and_intervals_are_over_books() -> None:
    generator = np.random.default_rng(1)
    places = [(book, 100 * number) for book in range(8) for number in range(1 + book % 3)]
    # Windows differ by whole bits, models by hundredths: only pairs can show it.
    hard = {place: generator.normal(2, 1, 2) for place in places}
    ours = {seed: of(hard) for seed in range(3)}
    gain = {place: 0.02 + 0.005 * generator.normal(size=2) for place in places}
    rival = {seed: of({p: hard[p] + gain[p] + 0.001 * seed for p in places}) for seed in range(3)}
    found = differences(ours, rival)["<16"]
    books = [np.mean([gain[p][0] for p in places if p[0] == book]) + 0.001 for book in range(8)]
    assert found.books.mean == pytest.approx(np.mean(books))
    assert found.seeds.mean == pytest.approx(found.books.mean)
    assert found.books.count == 8
    assert found.books.half == pytest.approx(2.3646 * np.std(books, ddof=1) / 8**0.5, rel=1e-4)
    assert found.seeds.count == 3
    assert found.seeds.half == pytest.approx(4.3027 * 0.001 / 3**0.5, rel=1e-4)
    assert judge_lead([found.judged]) == "holds"
    assert judge_lead([found.shifted(0.05).judged]) == "does not hold"
    one = differences({0: ours[0]}, rival)["<16"]
    assert judge_lead([one.judged]) == "undecided"
    assert differences(ours, {7: rival[0]}) == {}


def test_seeds_that_disagree_decide_nothing_however_many_books_there_are() -> None:
    places = [(book, 0) for book in range(50)]
    ours = {seed: of({p: [2.0, 2.0] for p in places}) for seed in range(3)}
    shifts = (0.03, -0.02, 0.02)
    rival = {seed: of({p: [2.0 + shift, 2.0] for p in places}) for seed, shift in enumerate(shifts)}
    found = differences(ours, rival)["<16"]
    assert found.books.low > 0
    assert judge_lead([found.judged]) == "undecided"


def test_models_that_were_shown_other_windows_are_not_compared() -> None:
    with pytest.raises(ValueError, match="windows must be the same for both models, seed 0"):
        differences({0: of({(0, 0): [1, 1]})}, {0: of({(0, 100): [1, 1]})})


def test_a_rise_between_classes_is_taken_within_windows() -> None:
    rows = {(book, 0): [1.0 + book, 1.5 + book] for book in range(5)}
    found = between_classes({0: of(rows), 1: of(rows)}, "all", "<16")
    assert (found.books.mean, found.books.half) == pytest.approx((0.5, 0.0))


def test_a_reading_is_the_same_whatever_is_read_together(shelf: Path, monkeypatch: Any) -> None:
    model, task = made(shelf)
    together = read_on(model, task, TRAINING, lengths=(32,), bounds=BOUNDS)
    monkeypatch.setattr("vort.lab.experiments.reading._TOGETHER", 1)
    alone = readings({"reading": read_on(model, task, TRAINING, lengths=(32,), bounds=BOUNDS)})
    for place, bits in readings({"reading": together})[32, None].windows.items():
        assert alone[32, None].windows[place].tolist() == pytest.approx(bits.tolist(), abs=2e-4)


def test_a_place_must_leave_a_window(shelf: Path) -> None:
    _, task = made(shelf)
    assert task.batch_at("test", [(1, 267)], 32)["input_ids"].shape == (1, 32)
    for place in ((1, 268), (4, 0), (1, -1)):
        with pytest.raises(IndexError, match="must leave 33 characters of a document"):
            task.batch_at("test", [place], 32)


def test_marks_count_as_characters_of_a_document(shelf: Path) -> None:
    _, task = made(shelf)
    marked = replace(task, marks=True)
    assert [marked._lengths("test")[1], task._lengths("test")[1]] == [302, 300]
    first = marked.batch_at("test", [(2, 0)], 32)["input_ids"][0]
    assert first[0] == 257
    assert bytes(first[1:].tolist()) == (shelf / "test" / "2.txt").read_bytes()[:31]
