"""What every generated task promises."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vort.lab.tasks import IGNORED, MQAR, SPLITS, LabelCopy, Task, ZipfRetrieval, make_task
from vort.lab.tasks.task import GeneratedTask

TASKS = [
    ZipfRetrieval(length=300, pairs=20, keys=32, bounds=(10, 100)),
    ZipfRetrieval(length=100, queries="dense", bounds=(10,)),
    LabelCopy(length=300, entities=5, mentions=4, names=16, bounds=(20, 100)),
    MQAR(length=96, pairs=12, vocabulary=128, bounds=(32,)),
    MQAR(length=96, pairs=12, vocabulary=128, gaps="uniform", bounds=(32,)),
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
    with pytest.raises(ValueError, match=r"task must be one of zipf_retrieval.*, got 'zip'"):
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
