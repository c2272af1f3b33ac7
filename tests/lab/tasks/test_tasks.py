"""What every task promises, and random numbers by name."""

from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from vort.lab.tasks import (
    IGNORED,
    MQAR,
    SPLITS,
    Books,
    LabelCopy,
    Ruler,
    Task,
    ZipfRetrieval,
    make_task,
)
from vort.lab.tasks import (
    TASKS as NAMED,
)
from vort.lab.tasks.task import GeneratedTask, Row, stream, uniform_below

TASKS = [
    ZipfRetrieval(length=300, pairs=20, keys=32, bounds=(10, 100)),
    ZipfRetrieval(length=100, queries="dense", bounds=(10,)),
    LabelCopy(length=300, entities=5, mentions=4, names=16, bounds=(20, 100)),
    MQAR(length=96, pairs=12, vocabulary=128, bounds=(32,)),
    MQAR(length=96, pairs=12, vocabulary=128, gaps="uniform", bounds=(32,)),
    Ruler(length=400, kind="niah_multiquery", words=128, bounds=(50, 200)),
    Ruler(length=800, kind="vt", tokens="bytes", bounds=(50, 200), mixed=(800,)),
]
every_task = pytest.mark.parametrize("task", TASKS, ids=lambda t: f"{t.name}-{t.describe()}"[:40])


@every_task
@given(data=st.data())
def test_a_sequence_does_not_depend_on_its_batch(task: GeneratedTask, data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, task.size("test") - 1), min_size=1, max_size=5))
    together = task.batch("test", indices)
    for row, index in enumerate(indices):
        alone = task.batch("test", [index])
        for name, tensor in alone.items():
            assert torch.equal(tensor[0], together[name][row])


@pytest.mark.parametrize("train", [5, None])
def test_a_sequence_that_was_drawn_before_is_the_same_again(train: int | None) -> None:
    task = make_task("zipf_retrieval", length=200, pairs=8, keys=16, train_sequences=train)
    assert isinstance(task, GeneratedTask)
    drawn: list[int] = []

    def row(own: GeneratedTask, split: Any, index: int) -> Row:
        drawn.append(index)
        return own.draw(stream(own.seed, own.name, split, index))

    with mock.patch.object(GeneratedTask, "row", row):
        first, again = task.batch("train", [3, 1]), task.batch("train", [1, 3])
    for name, x in first.items():
        assert torch.equal(x, again[name].flip(0))  # type: ignore[literal-required]
    assert first["input_ids"][0].tolist() == task.row("train", 3).tokens.tolist()
    # A split without end is never gone through again: nothing of it is kept.
    assert drawn == ([3, 1] if train else [3, 1, 1, 3])


@every_task
def test_no_sequence_is_in_two_splits(task: GeneratedTask) -> None:
    rows = [
        tuple(row.tolist())
        for split in SPLITS
        for row in task.batch(split, range(100))["input_ids"]
    ]
    assert len(set(rows)) == len(rows)


@every_task
def test_another_seed_gives_other_sequences(task: GeneratedTask) -> None:
    other = make_task(task.name, **{**_settings(task), "seed": 1})
    first, second = (t.batch("train", [0])["input_ids"] for t in (task, other))
    assert not torch.equal(first, second)


@every_task
def test_labels_buckets_and_sources_are_at_the_same_positions(task: GeneratedTask) -> None:
    batch = task.batch("train", range(20))
    asked = batch["labels"] != IGNORED
    assert torch.equal(asked, batch["sources"] >= 0)
    assert torch.equal(asked, batch["buckets"] >= 0)
    assert int(batch["labels"].max()) < task.num_classes
    assert int(batch["buckets"].max()) < len(task.bucket_names)
    assert int(batch["input_ids"].min()) >= 0
    assert int(batch["input_ids"].max()) < task.vocab_size


@every_task
def test_buckets_are_classes_of_lag_that_hold_their_upper_end(task: GeneratedTask) -> None:
    batch = task.batch("train", range(20))
    position = torch.arange(task.length).expand_as(batch["input_ids"])
    lags = (position - batch["sources"])[batch["labels"] != IGNORED]
    buckets = batch["buckets"][batch["labels"] != IGNORED]
    ends = [0, *task.bounds, task.length]
    for lag, bucket in zip(lags.tolist(), buckets.tolist(), strict=True):
        assert ends[bucket] < lag <= ends[bucket + 1]


@every_task
def test_settings_survive_a_trip_through_their_description(task: GeneratedTask) -> None:
    assert make_task(task.name, **_settings(task)) == task


def _settings(task: Task) -> dict[str, object]:
    return {key: value for key, value in task.describe().items() if key != "task"}


@pytest.mark.parametrize("task", [*TASKS, Books(length=256)], ids=lambda t: t.name)
def test_every_position_is_of_one_kind_and_queries_are_told_apart(task: Task) -> None:
    batch = task.batch("test", [0, 1])
    kinds = task.kinds(batch)
    assert len(kinds) == 3
    assert (sum(member.int() for member in kinds.values()) == 1).all()
    if not task.text:
        assert torch.equal(kinds["again"], batch["sources"] >= 0)
        rows, queries = kinds["again"].nonzero(as_tuple=True)
        assert kinds["first"][rows, batch["sources"][rows, queries].long()].all()


def test_a_task_is_known_by_its_name_as_soon_as_it_is_defined() -> None:
    assert {"zipf_retrieval", "label_copy", "mqar", "books"} <= set(NAMED)

    @dataclass(frozen=True, kw_only=True)
    class Echo(GeneratedTask):
        name: ClassVar[str] = "echo"
        vocab_size: ClassVar[int] = 4
        length: int = 8

        def draw(self, rng: np.random.Generator) -> Row:
            tokens = rng.integers(4, size=self.length)
            last = np.array([self.length - 1])
            return Row(tokens, last, tokens[:1], np.array([0]))

    try:
        batch = make_task("echo", length=6).batch("train", [0])
        assert batch["labels"][0, -1] == batch["input_ids"][0, 0]
        with pytest.raises(ValueError, match="of one task only, got 'echo' twice"):
            type("Other", (GeneratedTask,), {"name": "echo"})
    finally:
        del NAMED["echo"]


def test_indices_beyond_a_split_are_an_error() -> None:
    task = ZipfRetrieval(length=100, pairs=4, test_sequences=10)
    with pytest.raises(IndexError, match=r"indices of split 'test' .* < 10, got 10"):
        task.batch("test", [10])
    with pytest.raises(IndexError, match="got -1"):
        task.batch("train", [-1])


def test_an_endless_split_has_any_index() -> None:
    task = ZipfRetrieval(length=100, pairs=4, train_sequences=None)
    assert task.size("train") is None
    assert task.batch("train", [10**12])["input_ids"].shape == (1, 100)


def test_unknown_tasks_and_settings_are_errors_that_help() -> None:
    with pytest.raises(ValueError, match=r"task must be one of .*zipf_retrieval.*, got 'zip'"):
        make_task("zip")
    with pytest.raises(TypeError, match=r"no setting 'lenght'; did you mean length\?"):
        make_task("mqar", lenght=5)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("zipf_retrieval", {"length": 100, "pairs": 26}, r"pairs must lie in \[1, .*25\], got 26"),
        ("zipf_retrieval", {"keys": 10}, "keys must be at least 64, .*got 10"),
        ("zipf_retrieval", {"queries": "many"}, "queries must be .*got 'many'"),
        ("zipf_retrieval", {"bounds": (100, 10)}, "bounds must be positive and increasing"),
        ("zipf_retrieval", {"train_sequences": 0}, "train_sequences must be at least 1, got 0"),
        ("label_copy", {"entities": 300}, r"entities must lie in \[1, names = 256\], got 300"),
        ("label_copy", {"length": 100}, "mentions must lie in .*got 10"),
        ("mqar", {"pairs": 100}, r"pairs must lie in \[1, 85\]"),
        ("mqar", {"power": 0.0}, r"power must lie in \(0, 1\], got 0.0"),
    ],
)
def test_impossible_settings_are_named(name: str, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_task(name, **settings)


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


def test_errors_of_streams_name_what_was_given() -> None:
    with pytest.raises(ValueError, match=r"split must be one of .*, got 'dev'"):
        stream(0, "task", "dev", 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"seed must lie in .*, got -1"):
        stream(-1, "task", "train", 0)
