"""The learning-rate search: fair, on validation data, and sure to say what it cost."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.lab.training.tiny import TASK, Tiny, quick
from vort.lab.tasks import Batch, ZipfRetrieval
from vort.lab.training import learning_rate_search


class Watched(ZipfRetrieval):
    """Remembers which splits were asked for."""

    seen: set[str] = set()  # noqa: RUF012

    def batch(self, split, indices) -> Batch:  # type: ignore[no-untyped-def]
        self.seen.add(split)
        return super().batch(split, indices)


def test_the_best_rate_is_the_one_of_fewest_validation_bits() -> None:
    found = learning_rate_search(Tiny, TASK, quick(), rates=(1e-6, 1e-2), steps=30)
    bits = {trial.learning_rate: trial.bits for trial in found.trials}
    assert found.best == min(bits, key=bits.__getitem__) == 1e-2
    assert found.at_edge
    assert (found.steps, found.tokens) == (30, 2 * 30 * 8 * 32)
    json.dumps(found.to_dict())


def test_the_test_split_is_never_looked_at() -> None:
    task = Watched(**vars(TASK))
    learning_rate_search(Tiny, task, quick(), rates=(1e-3, 1e-2), steps=2)
    assert task.seen == {"train", "validation"}


def test_all_trials_start_from_the_same_weights() -> None:
    first: list[Tensor] = []

    def build() -> nn.Module:
        model = Tiny()
        first.append(model.head.weight.detach().clone())
        return model

    learning_rate_search(build, TASK, quick(), rates=(1e-3, 3e-3, 1e-2), steps=1)
    assert len(first) == 3
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[0], first[2])


def test_a_rate_that_breaks_training_loses() -> None:
    class Fragile(Tiny):
        def forward(self, input_ids: Tensor) -> Tensor:
            logits: Tensor = super().forward(input_ids)
            return logits / (self.norm.bias.abs().max() < 1)

    found = learning_rate_search(Fragile, TASK, quick(), rates=(1e-3, 100.0), steps=3)
    assert found.best == 1e-3
    assert found.to_dict()["trials"][1]["bits"] is None
    with pytest.raises(FloatingPointError, match="broke down with every one of the rates"):
        learning_rate_search(Fragile, TASK, quick(), rates=(100.0,), steps=3)


def test_an_interrupted_search_goes_on(tmp_path: Path) -> None:
    def search() -> object:
        arguments = {"rates": (1e-3, 1e-2), "steps": 4, "directory": tmp_path, "resume": True}
        return learning_rate_search(Tiny, TASK, quick(), **arguments).to_dict()

    assert search() == search()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rate-0.001", "rate-0.01"]


def test_rates_must_differ() -> None:
    with pytest.raises(ValueError, match="rates must be at least one, all different"):
        learning_rate_search(Tiny, TASK, quick(), rates=(1e-3, 1e-3))
