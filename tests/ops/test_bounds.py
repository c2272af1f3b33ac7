"""What follows from bounds of packed sequences is made once, and never of bounds that changed."""

import gc

import pytest
import torch

from vort.ops import bounds as module
from vort.ops.bounds import ages, made_once, sequence_starts


def test_the_same_bounds_are_asked_once() -> None:
    bounds = torch.tensor([0, 3, 3, 7])
    first = ages(bounds, 7)
    assert first.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert ages(bounds, 7) is first
    assert sequence_starts(7, bounds, bounds.device).tolist() == [0, 0, 0, 3, 3, 3, 3]
    assert ages(bounds, 8) is not first


WAYS = ["written to", "written to by NumPy", "written to as data", "of the same numbers"]


@pytest.mark.parametrize("change", [*WAYS, "in between"])
def test_bounds_that_changed_are_asked_again(change: str) -> None:
    bounds = torch.tensor([0, 3, 7])
    first, wanted = ages(bounds, 7), [0, 1, 2, 0, 1, 2, 3]
    if change.startswith("written to"):
        place = bounds.data if change == "written to as data" else bounds
        (place.numpy() if change == "written to by NumPy" else place)[1] = 5
        wanted = [0, 1, 2, 3, 4, 0, 1]
    elif change == "of the same numbers":
        bounds = bounds.clone()
    else:
        assert ages(torch.tensor([0, 7]), 7).tolist() == list(range(7))
    again = ages(bounds, 7)
    assert again is not first
    assert again.tolist() == wanted


def test_nothing_is_kept_of_bounds_that_are_gone() -> None:
    bounds = torch.tensor([0, 3, 7])
    ages(bounds, 7)
    assert module._last is not None
    del bounds
    gc.collect()
    assert module._last is None


def test_what_counts_no_writes_is_asked_every_time() -> None:
    with torch.inference_mode():
        bounds = torch.tensor([0, 3, 7])
        asked: list[int] = []
        for _ in range(2):
            made_once(bounds, "name", lambda: asked.append(1))
    assert len(asked) == 2


@pytest.mark.gpu
def test_a_recording_makes_its_own() -> None:
    bounds = torch.tensor([0, 3, 7], device="cuda")
    before = ages(bounds, 7)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = ages(bounds, 7)
    assert recorded is not before
    bounds.copy_(torch.tensor([0, 5, 7]))
    graph.replay()
    assert recorded.tolist() == [0, 1, 2, 3, 4, 0, 1]
