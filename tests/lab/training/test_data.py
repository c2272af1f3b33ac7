"""Which sequences a step sees."""

from collections.abc import Sequence
from dataclasses import fields
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.lab.training.tiny import TASK
from vort.lab.tasks import IGNORED, Batch, LabelCopy, Split, Task
from vort.lab.training.data import (
    HeldSplit,
    Pieces,
    UnequalError,
    compact,
    fill_up,
    held_batches,
    keep_batches,
    load,
    step_indices,
)
from vort.lab.training.scorer import Scorer


@given(size=st.integers(1, 30), batch=st.integers(1, 12), seed=st.integers(0, 99))
def test_an_epoch_sees_each_sequence_once(size: int, batch: int, seed: int) -> None:
    steps = -(-2 * size // batch)
    seen = [index for step in range(steps) for index in step_indices(step, batch, size, seed)]
    for epoch in (seen[:size], seen[size : 2 * size]):
        assert sorted(epoch) == list(range(size))


def test_epochs_have_orders_of_their_own() -> None:
    first, second, other = (step_indices(k, 50, 50, s) for k, s in ((0, 0), (1, 0), (0, 1)))
    assert first != second
    assert first != other


@given(
    pieces=st.integers(1, 4),
    processes=st.integers(1, 4),
    share=st.integers(1, 3),
)
def test_processes_and_pieces_share_a_batch_out(pieces: int, processes: int, share: int) -> None:
    batch = pieces * processes * share
    parts = [
        piece
        for rank in range(processes)
        for piece in Pieces(3, 5, batch, None, 0, pieces, processes, rank)
    ]
    found = sorted(index for part in parts for index in part)
    assert found == list(range(3 * batch, 5 * batch))
    assert {len(part) for part in parts} == {share}


def test_a_compact_batch_holds_what_is_asked_and_no_more() -> None:
    batch = TASK.batch("train", range(4))
    found = compact(batch)
    asked = batch["labels"] != IGNORED
    assert torch.equal(found["targets"], batch["labels"][asked])
    assert torch.equal(found["input_ids"].flatten()[found["positions"]], batch["input_ids"][asked])
    assert torch.equal(found["buckets"], batch["buckets"][asked].long())


def test_workers_change_nothing_and_use_no_random_numbers() -> None:
    state = torch.get_rng_state()
    groups = [[0, 1], [2], [3, 4]]
    alone, helped = (
        list(load(TASK, "train", groups, torch.device("cpu"), workers)) for workers in (0, 2)
    )
    assert torch.equal(state, torch.get_rng_state())
    for first, second in zip(alone, helped, strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_batches_that_are_kept_are_drawn_once_as_long_as_there_is_room() -> None:
    drawn: list[tuple[int, ...]] = []

    class Counted(type(TASK)):  # type: ignore[misc]
        def batch(self, split: Split, indices: Sequence[int]) -> Batch:
            drawn.append(tuple(indices))
            return super().batch(split, indices)

    task = Counted(**{field.name: getattr(TASK, field.name) for field in fields(TASK)})
    groups = [[0, 1], [2, 3]]
    try:
        for room, times in ((0, 2), (1 << 20, 1), (1, 2)):
            keep_batches(room)
            drawn.clear()
            first, again = (
                list(load(task, "train", groups, torch.device("cpu"))) for _ in range(2)
            )
            assert drawn == [(0, 1), (2, 3)] * times
            for one, other in zip(first, again, strict=True):
                assert all(torch.equal(one[name], other[name]) for name in one)
    finally:
        keep_batches(0)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_batches_that_are_filled_up_have_few_shapes_and_the_same_loss() -> None:
    """What fills them up is asked for once, answered by nothing, and changes no gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 5))
    scorer = Scorer(model, 5)
    shapes = set()
    for count in (1, 5, 8, 9, 13, 31, 60):
        labels = torch.full((4, 15), IGNORED)
        places = torch.randperm(60)[:count]
        labels.view(-1)[places] = torch.randint(5, (count,))
        tokens, zeros = torch.randint(40, (4, 15)), torch.zeros(4, 15)
        batch: Batch = {"input_ids": tokens, "labels": labels, "buckets": zeros, "sources": zeros}
        plain = compact(batch)
        filled = fill_up(plain)
        shapes.add(len(filled["positions"]))
        assert len(filled["positions"].unique()) == len(filled["targets"])
        found = []
        for each in (plain, filled):
            model.zero_grad()
            loss = scorer(each)["loss"]
            loss.backward()
            found.append([loss.detach(), *gradients(model)])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)
    assert shapes == {1, 8, 16, 32, 60}


@pytest.mark.parametrize("task", [TASK, LabelCopy(length=80, entities=3, mentions=2)])
def test_a_split_that_is_held_gives_what_is_drawn_anew(task: Task) -> None:
    held = HeldSplit(task, "train", torch.device("cpu"))
    for indices in ([5, 2, 9], [2, 5, 7, 2], [9]):
        found, anew = held.batch(indices), compact(task.batch("train", indices))
        assert list(found) == list(anew)
        for name, x in anew.items():
            assert torch.equal(found[name], x), name
            assert found[name].dtype == x.dtype


def test_a_held_split_draws_a_sequence_once() -> None:
    task = mock.Mock(wraps=TASK, vocab_size=TASK.vocab_size, length=TASK.length)
    held = HeldSplit(task, "train", torch.device("cpu"))
    for indices in ([3, 1], [1, 4], [3, 4, 1]):
        held.batch(indices)
    assert [call.args[1] for call in task.batch.call_args_list] == [[3, 1], [4]]


def test_a_held_split_refuses_rows_that_ask_at_other_numbers_of_positions() -> None:
    class Ragged(type(TASK)):  # type: ignore[misc]
        def batch(self, split: Split, indices: Sequence[int]) -> Batch:
            found: Batch = super().batch(split, indices)
            for row, index in enumerate(indices):
                if index == 3:
                    asked = (found["labels"][row] != IGNORED).nonzero()
                    found["labels"][row, asked[0]] = IGNORED
            return found

    ragged = Ragged(**{x.name: getattr(TASK, x.name) for x in fields(TASK)})
    groups = [[1, 2], [4], [3], [5]]
    assert len(list(held_batches(ragged, "train", groups, torch.device("cpu")))) == 2
    for first, then in (([1, 2], [3]), ([2, 3], [1])):
        held = HeldSplit(ragged, "train", torch.device("cpu"))
        with pytest.raises(UnequalError):
            [held.batch(indices) for indices in (first, then)]
