import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vort.lab.tasks import LabelCopy, ZipfRetrieval, sources_by_key
from vort.lab.tasks.task import GeneratedTask
from vort.plasticity import Retrievals

TASKS = [
    LabelCopy(length=200, entities=5, mentions=4),
    ZipfRetrieval(length=200, pairs=12),
    ZipfRetrieval(length=64, queries="dense"),
]


@given(st.integers(0, 1000), st.integers(1, 4), st.integers(1, 30))
def test_every_query_is_listed_once_with_its_source(seed: int, batch: int, length: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    before = (torch.rand(batch, length, generator=generator) * torch.arange(length)).long()
    asks = (torch.rand(batch, length, generator=generator) < 0.3) & (torch.arange(length) > 0)
    sources = torch.where(asks, before, -1)
    found = Retrievals.of(sources)
    rebuilt = torch.full_like(sources, -1)
    for row, (queries, origins, asked) in enumerate(zip(*found, strict=True)):
        rebuilt[row, queries[asked]] = origins[asked]
    assert torch.equal(rebuilt, sources)
    assert found.total == int(asks.sum())


@pytest.mark.parametrize("task", TASKS, ids=lambda task: f"{task.name}-{task.length}")
def test_sources_found_by_key_are_those_of_the_task(task: GeneratedTask) -> None:
    batch = task.batch("train", range(8))
    found = sources_by_key(task.vocabulary)(batch["input_ids"])  # type: ignore[attr-defined]
    assert torch.equal(found, batch["sources"].long())


def test_first_mentions_are_the_sources_of_label_copy() -> None:
    task = TASKS[0]
    batch = task.batch("train", [0, 1])
    first = Retrievals.of(batch["sources"]).is_source(task.length)
    assert first.sum(1).tolist() == [5, 5]
    assert bool((first <= batch["entity_mask"].bool()).all())


def test_a_source_after_its_query_is_refused() -> None:
    with pytest.raises(
        ValueError, match="sources must lie before their queries, got 2 at position 1"
    ):
        Retrievals.of(torch.tensor([[-1, 2, -1]]))


def test_sources_must_be_whole_numbers_of_two_axes() -> None:
    with pytest.raises(
        ValueError, match=r"sources must be whole numbers \[B, T\], got torch.float32"
    ):
        Retrievals.of(torch.zeros(2, 3))
