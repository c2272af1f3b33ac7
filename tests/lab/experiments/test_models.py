"""Rows of the tables as models: what they are said to have, seeds, kernels that load fast."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lab.experiments.tiny import TASK, tiny
from vort.lab.experiments import run
from vort.lab.experiments.cell import RunFolder
from vort.lab.experiments.models import MODELS, build_model, few_configurations, recall_config
from vort.lab.experiments.recall import recall_cell
from vort.lab.tasks import MQAR, Books, make_task

# Rows that are said to have gates: (write gate, read weights, write gain).
GATED = {
    "vort": (True, True, False),
    "vort_spread": (True, True, False),
    "vort_one_scale": (True, False, False),
    "vort_no_read": (True, False, False),
    "vort_no_gate": (False, True, False),
    "vort_half_features": (True, True, False),
    "vort_no_normalizer": (True, True, False),
    "vort_favor": (True, True, False),
    "vort_banks": (True, True, False),
    "mixture_gated": (True, True, False),
    "mixture_even_gated": (True, True, False),
    "mixture_rates_gated": (True, True, False),
    "mixture_rates_gain": (True, True, True),
    "mixture_rates_free": (True, True, True),
    "uniform_power_law_gated": (True, True, False),
    "exponential_learned_gated": (True, False, False),
    "linear_gated": (True, False, False),
    "gla_gated": (True, True, False),
}


def test_the_head_has_a_row_for_each_class_and_tokens_are_sums_of_parts() -> None:
    task = make_task(**tiny().task)
    model = build_model(task, tiny().config, seed=0)
    assert model.get_output_embeddings().weight.shape[0] == task.num_classes == 16
    assert model(torch.zeros(1, 4, dtype=torch.long)).logits.shape[-1] == 16


def test_weights_are_those_of_the_seed() -> None:
    task = make_task(**tiny().task)
    first, again, other = (build_model(task, tiny().config, seed) for seed in (0, 0, 1))
    same = [torch.equal(x, y) for x, y in zip(first.parameters(), again.parameters(), strict=True)]
    assert all(same)
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


def test_a_cell_is_trained_from_the_weights_of_its_own_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    def train(model: Any, *args: Any, **options: Any) -> Any:
        started.append([x.detach().clone() for x in model.parameters()])
        raise RuntimeError("no need to train")

    monkeypatch.setattr(run, "train", train)
    for seed in (0, 1):
        with pytest.raises(RuntimeError, match="no need to train"):
            run.run_cell(tiny(seed=seed), RunFolder(tmp_path))
    task = make_task(**tiny().task)
    for seed, found in enumerate(started):
        wanted = build_model(task, tiny().config, seed).parameters()
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    assert not torch.equal(started[0][0], started[1][0])


def gates_of(model: Any) -> dict[str, Any]:
    memory = model.model.layers[0].self_attn.memory
    gates = getattr(memory, "router", memory)
    gates = getattr(gates, "gates", None)
    found = {name: getattr(gates, name, None) for name in ("write", "read")}
    return {**found, "gain": getattr(memory, "gate_gain", None)}


@pytest.mark.parametrize("name", GATED)
@torch.no_grad()
def test_a_row_has_the_gates_that_it_is_said_to_have(name: str) -> None:
    task = make_task(**tiny().task)
    config = {**recall_config("laptop", MODELS[name].settings), "horizon": 100}
    model = build_model(task, config, seed=0).eval()
    tokens = torch.arange(5, 25)[None]
    before = model(tokens).logits
    for gate, has in zip(("write", "read", "gain"), GATED[name], strict=True):
        projection = gates_of(model)[gate]
        assert (projection is not None) == has, gate
        if projection is not None:
            kept = projection.weight.clone()
            projection.weight.normal_()
            assert (model(tokens).logits - before).abs().max() > 1e-4, gate
            projection.weight.copy_(kept)
    torch.testing.assert_close(model(tokens).logits, before)


@pytest.mark.parametrize("name", ["power_law", "mixture", "exponential", "exponential_long"])
def test_a_row_of_the_paper_has_no_gates(name: str) -> None:
    config = {**recall_config("laptop", MODELS[name].settings), "horizon": 100}
    found = gates_of(build_model(make_task(**tiny().task), config, seed=0))
    assert set(found.values()) == {None}


@pytest.mark.parametrize("name", MODELS)
def test_a_row_has_as_many_scales_as_its_label_says(name: str) -> None:
    for size, many in (("laptop", 8), ("paper", 12)):
        found = recall_config(size, MODELS[name].settings)["num_scales"]
        if "rates" in name or "even" in name or name == "uniform_power_law_gated":
            assert found == many
        elif name.startswith("mixture"):
            assert found == 5


def test_a_tuned_decay_is_the_decay_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = {
        "pilot/exponential": {"learning_rate": 1e-3, "exponential_rate": 0.0123},
        "pilot/exponential_learned_gated": {"learning_rate": 2e-3, "exponential_rate": 0.03},
    }

    def searched(search: str, size: str) -> dict[str, float] | None:
        return dict(searches[search]) if search in searches else None

    monkeypatch.setattr("vort.lab.experiments.search.searched", searched)

    def rates(name: str) -> tuple[float, float, str]:
        cell = recall_cell("pilot", "paper", name, 0, TASK)
        model = build_model(make_task(**cell.task), cell.config, seed=0)
        memory = model.model.layers[0].self_attn.memory
        decay = -memory.route(_inputs(memory)).log_decay
        assert (decay == decay[0]).all()
        return decay[0].item(), cell.training["learning_rate"], cell.search

    assert rates("exponential") == (pytest.approx(0.0123), 1e-3, "pilot/exponential")
    # Its own start, where one was searched; its kin's learning rate where none was.
    found = rates("exponential_learned_gated")
    assert found == (pytest.approx(0.03), 2e-3, "pilot/exponential_learned_gated")
    # What was tuned for all lags is not what is best at long ones.
    decay, rate, search = rates("exponential_long")
    assert (rate, search) == (1e-3, "pilot/exponential")
    assert decay == pytest.approx(1 / (0.3 * 64))


def _inputs(memory: Any) -> Any:
    from vort.memories import MemoryInputs

    q, k, v = torch.zeros(3, 1, 2, memory.num_heads, memory.head_dim)
    return MemoryInputs(torch.zeros(1, 2, memory.settings.hidden_size), q, k, v)


@pytest.mark.parametrize("task", [MQAR(length=64, pairs=8, vocabulary=64), Books(length=64)])
def test_tasks_without_parts_have_a_plain_embedding(task) -> None:
    model = build_model(task, tiny().config, seed=0)
    assert model.get_input_embeddings().weight.shape[0] == task.vocab_size
    assert model.get_output_embeddings().weight.shape[0] == task.num_classes


def test_kernels_loaded_for_a_baseline_try_few_configurations() -> None:
    triton = pytest.importorskip("triton")

    def tuned(count: int) -> int:
        kernel = triton.jit(_nothing)
        configs = [triton.Config({}, num_warps=1 << n) for n in range(count)]
        return len(triton.autotune(configs, key=[])(kernel).configs)

    with few_configurations(3):
        assert [tuned(n) for n in (1, 3, 4, 10)] == [1, 3, 2, 3]
    assert tuned(10) == 10


def _nothing(x):  # type: ignore[no-untyped-def]
    pass
