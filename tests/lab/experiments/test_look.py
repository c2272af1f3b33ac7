"""What is kept of a trained model for the figures agrees with the model."""

import json
from typing import Any

import pytest
import torch

from tests.lab.experiments.tiny import tiny
from vort.lab.experiments import EXPERIMENTS
from vort.lab.experiments.look import _fullest, by_order, impose_order, look, reads, strip
from vort.lab.experiments.measures import orders_by_kind
from vort.lab.experiments.models import build_model
from vort.lab.tasks import MQAR, Books, LabelCopy, make_task
from vort.lab.training import TrainingConfig, evaluate
from vort.plasticity import memory_features, record_memories

CONFIG = TrainingConfig(steps=1, batch_size=4, precision="float32")


def made(**config: Any) -> tuple[Any, Any]:
    task = make_task(**tiny().task)
    return build_model(task, {**tiny().config, **config}, seed=0), task


def test_a_strip_shows_the_orders_that_the_model_gives() -> None:
    model, task = made(num_attention_heads=2)
    found = strip(model, task, CONFIG, positions=20, sequences=3)
    batch = task.batch("test", [found["sequence"]])
    part = slice(found["start"], found["start"] + 20)
    orders = model.model(batch["input_ids"], output_orders=True, use_cache=False).orders[0]
    shown = torch.tensor(found["layers"][0]["order"])
    assert shown.shape == (2, 20)
    assert torch.allclose(shown, orders[0, part].T, atol=1e-4)
    kinds = task.kinds(batch)
    assert all(kinds[kind][0, part.start + t] for t, kind in enumerate(found["kinds"]))


def test_sources_in_a_strip_are_the_anchors_of_its_queries() -> None:
    model, task = made()
    found = strip(model, task, CONFIG, positions=40)
    pairs = [(query, source) for query, source in enumerate(found["sources"]) if source is not None]
    assert pairs
    for query, source in pairs:
        assert (found["kinds"][source], found["kinds"][query]) == ("first", "again")


@pytest.mark.parametrize("positions", [1, 7, 30, 50])
def test_the_stretch_of_a_strip_is_the_first_of_the_best(positions: int) -> None:
    """One start after another, as the words have it."""
    generator = torch.Generator().manual_seed(positions)
    first = torch.rand(3, 30, generator=generator) < 0.3
    sources = (torch.rand(3, 30, generator=generator) * torch.arange(30)).long()
    sources[torch.rand(3, 30, generator=generator) < 0.7] = -1
    found = {}
    for row in range(3):
        queries = [t for t in range(30) if sources[row, t] >= 0]
        for start in range(max(1, 30 - positions + 1)):
            end = start + positions
            inside = [t for t in queries if sources[row, t] >= start and t < end]
            found[row, start] = len(inside), int(first[row, start:end].sum())
    assert _fullest(first, sources, positions) == max(found, key=found.__getitem__)


def test_reads_are_shares_of_the_scales_for_every_kind_of_query() -> None:
    model, task = made()
    (layer,) = reads(model, task, CONFIG)["layers"]
    assert layer["time_constants"][0] is None  # the scale that forgets nothing
    assert layer["time_constants"][1:] == sorted(layer["time_constants"][1:], reverse=True)
    assert set(layer["kinds"]) == {"lag <=4", "lag 4-16", "lag >16", "first", "filler"}
    for kind in layer["kinds"].values():
        assert sum(kind["shares"][0]) == pytest.approx(1, abs=1e-5)


def test_levels_are_what_every_pair_of_positions_adds_up_to() -> None:
    """Shares by order of what is retrieved, against p_it written out pair by pair."""
    model, task = made(num_attention_heads=2)
    (layer,) = reads(model, task, CONFIG, sequences=3)["layers"]
    batch = task.batch("test", range(3))
    with torch.no_grad(), record_memories(model) as found:
        model.model(batch["input_ids"], use_cache=False)
    memory, inputs = found[0]
    with torch.no_grad():
        routing, (q, k) = memory.route(inputs), memory_features(memory, inputs)
    age = torch.arange(task.length)[:, None] - torch.arange(task.length)
    kept = torch.exp(routing.log_decay * age.clamp_min(0)[..., None])
    weights = torch.einsum("bths,tis,bihs->bhti", routing.read, kept, routing.write)
    weights = weights * torch.einsum("bthk,bihk->bhti", q, k) * (age > 0)
    shares = weights / weights.sum(-1, keepdim=True).clamp_min(1e-30)
    level = (routing.order * 10).long().clamp(max=9)
    members = {**task.kinds(batch), "lag >16": (batch["sources"] >= 0) & (batch["buckets"] == 2)}
    for name in ("filler", "first", "lag >16"):
        for head in range(2):
            by_level = [
                (shares[:, head] * (level[:, None, :, head] == number)).sum(-1)
                for number in range(10)
            ]
            # The first token retrieves nothing and does not count.
            chosen = members[name].clone()
            chosen[:, 0] = False
            expected = torch.stack(by_level, -1)[chosen].mean(0)
            measured = torch.tensor(layer["kinds"][name]["levels"][head])
            assert torch.allclose(measured, expected, atol=1e-5)
            assert float(measured.sum()) == pytest.approx(1, abs=1e-5)
    assert torch.tensor(layer["written"]).sum(-1).tolist() == pytest.approx([1, 1])


def test_features_that_may_be_negative_have_no_levels() -> None:
    model, task = made(feature_map="identity")
    (layer,) = reads(model, task, CONFIG, sequences=2)["layers"]
    assert "written" not in layer
    assert all("levels" not in kind for kind in layer["kinds"].values())


def test_without_gates_every_token_is_written_and_all_scales_are_read_alike() -> None:
    model, task = made(write_gate=False, read_weights=False)
    (seen,) = look(model, task.batch("test", [0]), CONFIG)
    assert seen.gate.eq(1).all()
    assert seen.read.eq(1).all()


def test_an_imposed_order_is_what_those_tokens_get_and_only_while_it_lasts() -> None:
    model, task = made()
    batch = task.batch("test", [0])
    where = task.kinds(batch)["first"]
    before = look(model, batch, CONFIG)[0].order
    for order in (model.config.order_min, 0.5, 1.0):
        with impose_order(model, order, where):
            during = look(model, batch, CONFIG)[0].order
        assert torch.allclose(during[where], torch.tensor(order), atol=1e-6)
        assert torch.equal(during[~where], before[~where])
    assert torch.equal(look(model, batch, CONFIG)[0].order, before)


def test_accuracy_by_order_counts_every_query_once_and_adds_up() -> None:
    model, task = made()
    found = by_order(model, task, CONFIG, orders=(0.1, 1.0), bounds=(4, 16), sequences=8)
    total = evaluate(model, task, "test", batch_size=4)["all"]
    assert found["lags"] == [[1, 4], [5, 16], [17, 63]]
    for rows in (found["learned"], found["imposed"][:1], found["imposed"][1:]):
        assert sum(sum(row["count"]) for row in rows) == total["count"]
    right = sum(
        (share or 0) * count
        for row in found["learned"]
        for share, count in zip(row["accuracy"], row["count"], strict=True)
    )
    assert right / total["count"] == pytest.approx(total["accuracy"])


def test_models_without_orders_cannot_be_looked_at() -> None:
    model, task = made(memory="exponential")
    with pytest.raises(TypeError, match="must have orders"):
        look(model, task.batch("test", [0]), CONFIG)


def test_only_the_first_vort_of_the_laptop_is_looked_at_closely() -> None:
    after = {
        size: {(c.model, c.seed): c.after for c in EXPERIMENTS["pilot"].cells(size, None)}
        for size in ("laptop", "paper")
    }
    assert sorted(after["laptop"]["vort", 0]) == ["by_order", "orders", "reads", "strip"]
    assert after["laptop"]["vort", 1] == after["paper"]["vort", 0] == {"orders": {}}
    assert after["laptop"]["mixture", 0] == {}


@pytest.mark.parametrize(
    "task",
    [
        LabelCopy(length=64, entities=2, mentions=2, names=4, bounds=(8,)),
        MQAR(length=64, pairs=8, vocabulary=64, bounds=(8,)),
        Books(length=64),
    ],
    ids=lambda task: task.name,
)
def test_every_task_can_be_looked_at(task: Any) -> None:
    model = build_model(task, tiny().config, seed=0)
    kinds = set(task.kinds(task.batch("test", [0])))
    assert set(orders_by_kind(model, task, CONFIG)["layers"][0]) == kinds
    assert ("text" in strip(model, task, CONFIG, positions=20, sequences=1)) == task.text
    assert reads(model, task, CONFIG, sequences=2)["layers"]


def test_what_is_kept_is_ready_for_json() -> None:
    model, task = made()
    for measure in (strip, reads, by_order):
        json.dumps(measure(model, task, CONFIG), allow_nan=False)
