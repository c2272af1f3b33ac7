"""Checkpoints: complete or absent, never a pickle."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.lab.training.tiny import TASK, quick, tiny, weights
from vort.lab.training import latest_checkpoint, load_weights, train
from vort.lab.training.checkpoint import load_checkpoint, save_checkpoint
from vort.lab.training.setup import make_optimizer


def some_steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 2) -> None:
    for _ in range(count):
        model(torch.randint(TASK.vocab_size, (2, 8))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_state_that_is_no_object_is_damaged(tmp_path: Path) -> None:
    model = tiny()
    place = save_checkpoint(tmp_path, 2, model, make_optimizer(model, quick()), {})
    (place / "state.json").write_text("[1]")
    with pytest.raises(
        ValueError, match=r"state.json is damaged: it must hold an object, got list"
    ):
        load_checkpoint(place, model, make_optimizer(model, quick()))


def test_optimiser_and_random_numbers_come_back_to_the_bit(tmp_path: Path) -> None:
    model = tiny()
    optimizer = make_optimizer(model, quick())
    some_steps(model, optimizer)
    save_checkpoint(tmp_path, 2, model, optimizer, {"note": [1, 2]})
    draws = (torch.rand(3), np.random.rand(3), random.random())  # noqa: NPY002
    some_steps(model, optimizer)

    other = tiny(seed=1)
    again = make_optimizer(other, quick())
    state = load_checkpoint(tmp_path / "step-00000002", other, again)
    assert (state["step"], state["note"]) == (2, [1, 2])
    assert torch.equal(torch.rand(3), draws[0])
    assert np.array_equal(np.random.rand(3), draws[1])  # noqa: NPY002
    assert random.random() == draws[2]
    some_steps(other, again)
    assert all(map(torch.equal, weights(other), weights(model)))


def test_files_are_safetensors_and_json(tmp_path: Path) -> None:
    train(tiny(), TASK, quick(), directory=tmp_path)
    files = {path.name for path in (tmp_path / "step-00000006").iterdir()}
    tensors = {f"{name}.safetensors" for name in ("model", "optimizer", "random")}
    assert files == tensors | {"state.json"}
    json.loads((tmp_path / "result.json").read_text())


def test_a_half_written_checkpoint_is_not_taken_up_and_goes_away(tmp_path: Path) -> None:
    config = quick(checkpoint_every=3)
    train(tiny(), TASK, config, directory=tmp_path)
    shutil.copytree(tmp_path / "step-00000006", tmp_path / "step-00000009.partial")
    (tmp_path / "step-00000009.partial" / "model.safetensors").write_bytes(b"half")
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.name == "step-00000006"
    model = tiny()
    save_checkpoint(tmp_path, 12, model, make_optimizer(model, config), {})
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000012"]


def test_as_many_checkpoints_stay_as_asked_for(tmp_path: Path) -> None:
    train(tiny(), TASK, quick(checkpoint_every=2, keep_checkpoints=2), directory=tmp_path)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000004", "step-00000006"]


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
        model[1].weight = model[0].weight
        return model

    model, other = tied(), tied()
    save_checkpoint(tmp_path, 1, model, make_optimizer(model, quick()), {})
    load_weights(tmp_path / "step-00000001", other)
    assert other[1].weight is other[0].weight
    assert torch.equal(other[0].weight, model[0].weight)


def test_another_model_is_refused(tmp_path: Path) -> None:
    train(tiny(), TASK, quick(), directory=tmp_path)
    path = tmp_path / "step-00000006"
    with pytest.raises(ValueError, match="of another model: it differs at"):
        load_weights(path, nn.Linear(2, 2))
    other = tiny()
    other.head = nn.Linear(16, 7)
    with pytest.raises(ValueError, match=r"head\.\w+ has shape .* there"):
        load_weights(path, other)
