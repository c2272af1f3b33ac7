"""The loop: it learns, resumes, stops at NaN and says where it is."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.lab.training.tiny import TASK, UNEVEN, quick, tiny, weights
from vort.lab.tasks import Books, ZipfRetrieval
from vort.lab.training import evaluate, train


class StopError(Exception):
    """Stands for whatever ends a run early."""


def stopping_at(step: int):  # type: ignore[no-untyped-def]
    """An objective that is plain cross-entropy until it raises."""
    calls = iter(range(step))

    def objective(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if next(calls, None) is None:
            raise StopError
        logits = model(batch["input_ids"]).flatten(0, 1)[batch["positions"]]
        return nn.functional.cross_entropy(logits, batch["targets"])

    return objective


def test_a_model_learns_what_is_there_to_learn() -> None:
    task = ZipfRetrieval(
        length=16, pairs=1, keys=1, labels=2, fillers=1, beta=3.0, train_sequences=None, bounds=(1,)
    )
    torch.manual_seed(0)
    model = nn.ModuleDict({"e": nn.Embedding(task.vocab_size, 16), "h": nn.Linear(16, 2)})
    memory = nn.GRU(16, 16, batch_first=True)
    model["m"] = memory
    model.forward = lambda input_ids: model["h"](memory(model["e"](input_ids))[0])  # type: ignore[method-assign]
    config = quick(steps=150, batch_size=32, learning_rate=2e-2, test_sequences=100, log_every=1)
    found = train(model, task, config)
    assert found.history[0]["loss"] > 0.5
    assert found.test["<=1"]["accuracy"] > 0.95
    assert found.test["all"]["count"] == 100


def test_the_same_seed_gives_the_same_weights_and_another_does_not() -> None:
    runs = []
    for seed in (0, 0, 1):
        model = tiny()
        train(model, TASK, quick(seed=seed))
        runs.append(weights(model))
    assert all(map(torch.equal, runs[0], runs[1]))
    assert not all(map(torch.equal, runs[0], runs[2]))


def test_workers_that_draw_sequences_change_nothing() -> None:
    runs = []
    for workers in (0, 2):
        model = tiny()
        train(model, TASK, quick(workers=workers))
        runs.append(weights(model))
    assert all(map(torch.equal, *runs))


def test_accumulated_pieces_give_the_gradient_of_the_whole_batch() -> None:
    runs = []
    for pieces in (1, 4):
        model = tiny(dropout=0.0)
        train(model, TASK, quick(accumulation=pieces))
        runs.append(weights(model))
    for first, second in zip(*runs, strict=True):
        assert torch.allclose(first, second, atol=1e-5)


def test_pieces_that_ask_unequally_often_give_the_gradient_of_the_whole_batch() -> None:
    runs, losses = [], []
    for pieces in (1, 4, 8):
        model = tiny(dropout=0.0)
        found = train(model, UNEVEN, quick(accumulation=pieces, eps=1e-3, log_every=1))
        losses.append(torch.tensor([entry["loss"] for entry in found.history if "loss" in entry]))
        runs.append(weights(model))
    for loss, run in zip(losses[1:], runs[1:], strict=True):
        assert torch.allclose(loss, losses[0], atol=1e-5)
        assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("stop", [3, 4, 5])
def test_resuming_gives_the_weights_of_a_run_without_interruption(
    tmp_path: Path, stop: int
) -> None:
    config = quick(checkpoint_every=2, evaluate_every=2, log_every=3)
    whole = tiny()
    wanted = train(whole, TASK, config, directory=tmp_path / "whole")
    with pytest.raises(StopError):
        train(tiny(), TASK, config, directory=tmp_path / "cut", objective=stopping_at(stop))
    model = tiny(seed=5)
    found = train(model, TASK, config, directory=tmp_path / "cut", resume=True)
    assert all(map(torch.equal, weights(model), weights(whole)))
    assert (found.test, found.validation) == (wanted.test, wanted.validation)
    assert found.history == wanted.history


@pytest.mark.parametrize("frozen", [0, 1])
def test_resuming_with_other_weights_frozen_is_refused_in_a_line(
    tmp_path: Path, frozen: int
) -> None:
    models = [tiny(), tiny()]
    models[frozen].embedding.weight.requires_grad_(False)
    train(models[0], TASK, quick(), directory=tmp_path)
    with pytest.raises(ValueError, match=r"is of another model: \d of its parameters learn, here"):
        train(models[1], TASK, quick(), directory=tmp_path, resume=True)


def test_resuming_a_finished_run_scores_it_again(tmp_path: Path) -> None:
    wanted = train(tiny(), TASK, quick(), directory=tmp_path)
    found = train(tiny(seed=3), TASK, quick(), directory=tmp_path, resume=True)
    assert found.test == wanted.test
    assert found.steps == 6


def test_a_limit_of_time_needs_a_place_to_save_to() -> None:
    with pytest.raises(ValueError, match=r"seconds=1 needs a directory"):
        train(tiny(), TASK, quick(), seconds=1)


def test_resuming_with_nothing_there_begins(tmp_path: Path) -> None:
    assert train(tiny(), TASK, quick(), directory=tmp_path / "new", resume=True).steps == 6


def test_a_run_is_neither_overwritten_nor_continued_with_other_settings(tmp_path: Path) -> None:
    train(tiny(), TASK, quick(), directory=tmp_path)
    with pytest.raises(FileExistsError, match=r"holds a run already .*resume=True"):
        train(tiny(), TASK, quick(), directory=tmp_path)
    with pytest.raises(ValueError, match=r"config.learning_rate must be 0.01, .*got 0.5"):
        train(tiny(), TASK, quick(learning_rate=0.5), directory=tmp_path, resume=True)
    other = ZipfRetrieval(**{**vars(TASK), "beta": 2.0})
    with pytest.raises(ValueError, match=r"task.beta must be 1.0, .*got 2.0"):
        train(tiny(), other, quick(), directory=tmp_path, resume=True)


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(tmp_path: Path) -> None:
    calls = iter(range(100))

    def breaks(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        factor = math.nan if next(calls) == 4 else 1.0
        return model(batch["input_ids"]).square().mean() * factor

    config = quick(checkpoint_every=2, log_every=10)
    with pytest.raises(FloatingPointError, match=r"broke down at step 5: loss nan.*learning_rate"):
        train(tiny(), TASK, config, directory=tmp_path, objective=breaks)
    # What was saved before is sound, and nothing was saved after.
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000004"]


def test_epochs_count_passes_over_the_training_split() -> None:
    assert train(tiny(), TASK, quick(steps=None, epochs=2, batch_size=16)).steps == 8
    with pytest.raises(ValueError, match="'books' has no end"):
        train(tiny(), Books(length=16), quick(steps=None, epochs=1))


def test_evaluation_looks_at_the_split_it_is_told_to_and_leaves_no_trace() -> None:
    model = tiny()
    model.train()
    state = torch.get_rng_state()
    found = {split: evaluate(model, TASK, split) for split in ("validation", "test")}
    assert [found[s]["all"]["count"] for s in ("validation", "test")] == [60, 90]
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
    # Products of other sizes may end in another bit, as on aarch64.
    other = evaluate(model, TASK, "test", batch_size=7)
    assert list(other) == list(found["test"])
    for name, scores in other.items():
        assert scores == pytest.approx(found["test"][name], rel=1e-6)
    evaluate(model.eval(), TASK, "test")
    assert not model.training
    with pytest.raises(ValueError, match="sequences must be at least 1"):
        evaluate(model, TASK, sequences=0)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got -4"):
        evaluate(model, TASK, batch_size=-4)


def test_the_test_split_is_left_alone_unless_asked_for() -> None:
    assert train(tiny(), TASK, quick(test_sequences=0)).test == {}


def test_a_model_that_gives_only_a_loss_trains_unscored() -> None:
    class Lossy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.weight.square().sum()

    model = Lossy()
    found = train(model, TASK, quick())
    assert found.test == {}
    assert (model.weight < 1).all()
    with pytest.raises(TypeError, match="must give logits"):
        evaluate(model, TASK)


def test_tensorboard_gets_losses_and_metrics_by_bucket(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = quick(log="tensorboard", log_every=2, evaluate_every=3)
    train(tiny(), TASK, config, directory=tmp_path)
    (events,) = (tmp_path / "vort").glob("events*")
    seen = EventAccumulator(str(events)).Reload()
    assert [event.step for event in seen.Scalars("loss")] == [2, 4, 6]
    assert "validation/accuracy <=4" in seen.Tags()["scalars"]


def test_a_tracker_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vort.lab.training.setup.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="log='wandb' needs the package wandb"):
        train(tiny(), TASK, quick(log="wandb"))


def test_the_bar_shows_speed_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    found = train(tiny(), TASK, quick(progress=True, log_every=1))
    assert found.tokens_per_second > 0
    shown = capsys.readouterr().out
    assert "6/6" in shown
    assert "tokens/s" in shown


def test_results_are_ready_for_json() -> None:
    found = train(tiny(), TASK, quick())
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()


def test_bf16_trains_on_a_cpu_too() -> None:
    found = train(tiny(), TASK, quick(precision="bf16"))
    assert math.isfinite(found.history[-1]["loss"])


def test_a_vort_model_trains_and_resumes_to_the_bit(tmp_path: Path) -> None:
    models = pytest.importorskip("vort.models")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = models.VortConfig(vocab_size=TASK.vocab_size, horizon=32, sliding_window=4, **sizes)
    settings = quick(steps=4, checkpoint_every=2, keep_checkpoints=2, test_sequences=4)
    model = models.VortForCausalLM(config)
    found = train(model, TASK, settings, directory=tmp_path)
    shutil.rmtree(tmp_path / "step-00000004")
    again = models.VortForCausalLM(config)
    assert train(again, TASK, settings, directory=tmp_path, resume=True).test == found.test
    assert all(map(torch.equal, weights(again), weights(model)))
    assert again.lm_head.weight is again.get_input_embeddings().weight
