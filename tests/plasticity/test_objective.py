"""The retrieval loss of a model's own memories, and training with it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vort.lab.tasks import LabelCopy, embed_parts, sources_by_key
from vort.lab.training import Scorer, TrainingConfig, train
from vort.lab.training.data import compact
from vort.memories import MemoryInputs, VortMemory
from vort.models import VortConfig, VortForCausalLM
from vort.plasticity import (
    Retrievals,
    memory_retrieval_loss,
    model_retrieval_loss,
    record_memories,
    retrieval_objective,
)

TASK = LabelCopy(
    length=64,
    entities=3,
    mentions=3,
    names=8,
    labels=4,
    fillers=8,
    train_sequences=None,
    validation_sequences=16,
)
FIND = sources_by_key(TASK.vocabulary)


def small_model(**changes: Any) -> VortForCausalLM:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": TASK.vocab_size,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "sliding_window": 8,
        "horizon": 1000,
        "conv_size": 0,
        "write_gate": False,
        "read_weights": False,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    model = VortForCausalLM(VortConfig(**{**settings, **changes}))
    embed_parts(model, TASK)
    return model


def batch_of(*indices: int) -> dict[str, Tensor]:
    return compact(TASK.batch("train", indices))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("features", ["favor", "hedgehog"])
def test_p_is_the_share_that_the_memory_returns_of_the_source(gated: bool, features: str) -> None:
    length, heads = 20, 2
    torch.manual_seed(1)
    memory = VortMemory(
        hidden_size=16,
        num_attention_heads=heads,
        horizon=1000,
        use_entropy=False,
        feature_map=features,
        write_gate=gated,
        read_weights=gated,
        include_self=False,
    ).double()
    hidden = torch.randn(2, length, 16, dtype=torch.float64)
    q, k = torch.randn(2, 2, length, heads, 8, dtype=torch.float64)
    # A value that names the position it was written at.
    v = torch.eye(length, dtype=torch.float64)[None, :, None].expand(2, length, heads, length)
    inputs = MemoryInputs(hidden, q, k, v)
    sources = torch.full((2, length), -1)
    sources[0, 5], sources[0, 19], sources[1, 10] = 2, 7, 9
    shares = memory(inputs).output
    found = memory_retrieval_loss(memory, inputs, Retrievals.of(sources))
    expected = -torch.stack(
        [shares[0, 5, :, 2].log() + shares[0, 19, :, 7].log(), shares[1, 10, :, 9].log()]
    )
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_without_weight_the_objective_is_the_loss_that_train_takes_by_itself() -> None:
    model, batch = small_model(), batch_of(0, 1)
    usual = Scorer(model, TASK.num_classes)(batch)["loss"]
    ours = retrieval_objective(0, num_classes=TASK.num_classes)(model, batch)
    torch.testing.assert_close(ours, usual)


def test_the_objective_adds_the_mean_over_layers_heads_and_queries() -> None:
    model, batch = small_model(num_hidden_layers=2, num_attention_heads=2), batch_of(0, 1)
    plain, heavy = (
        retrieval_objective(weight, sources=FIND)(model, batch).detach() for weight in (0, 2.0)
    )
    by_layer = model_retrieval_loss(model, batch["input_ids"], FIND(batch["input_ids"]))
    assert float(heavy - plain) == pytest.approx(sum(by_layer), rel=1e-4)
    one = retrieval_objective(1.0, sources=FIND, layers=[1])(model, batch).detach()
    assert float(one - plain) == pytest.approx(by_layer[1], rel=1e-4)


def test_sources_that_come_with_the_batch_are_taken() -> None:
    model, batch = small_model(), batch_of(0)
    found = retrieval_objective(1.0, sources=FIND)(model, batch)
    brought = {**batch, "sources": FIND(batch["input_ids"])}
    torch.testing.assert_close(retrieval_objective(1.0)(model, brought), found)


def test_the_loss_reaches_the_router() -> None:
    model, batch = small_model(), batch_of(0, 1)
    with record_memories(model) as found:
        model(input_ids=batch["input_ids"], use_cache=False)
    retrievals = Retrievals.of(FIND(batch["input_ids"]))
    memory_retrieval_loss(*found[0], retrievals).sum().backward()
    gradient = found[0][0].router.order.weight.grad  # type: ignore[union-attr]
    assert gradient is not None
    assert float(gradient.abs().max()) > 0


def test_recording_leaves_no_hook_behind() -> None:
    model, batch = small_model(), batch_of(0)
    with record_memories(model) as found:
        model(input_ids=batch["input_ids"])
    model(input_ids=batch["input_ids"])
    assert len(found) == 1


def test_training_with_the_loss_raises_first_mentions_above_fillers() -> None:
    model = small_model(hidden_size=32)
    config = TrainingConfig(
        steps=40,
        batch_size=8,
        learning_rate=1e-2,
        evaluation_sequences=1,
        test_sequences=0,
        progress=False,
        precision="float32",
    )
    batch = TASK.batch("validation", range(16))
    before = model_retrieval_loss(model, batch["input_ids"], batch["sources"])
    objective = retrieval_objective(1.0, sources=FIND, num_classes=TASK.num_classes)
    train(model, TASK, config, objective=objective)
    after = model_retrieval_loss(model, batch["input_ids"], batch["sources"])
    assert after[0] < before[0] - 1
    with torch.no_grad():
        (order,) = model.model(batch["input_ids"], output_orders=True).orders
    first = Retrievals.of(batch["sources"]).is_source(TASK.length)
    filler = batch["entity_mask"] == 0
    assert float(order[first].mean() - order[filler].mean()) > 0.2


def test_what_does_not_fit_is_named() -> None:
    model, batch = small_model(), batch_of(0)
    with pytest.raises(ValueError, match=r"weight must be at least 0 and finite, got -1"):
        retrieval_objective(-1)
    with pytest.raises(ValueError, match=r"sources must be given where batches have none"):
        retrieval_objective(1.0)(model, batch)
    with pytest.raises(ValueError, match=r"layers must name some of 0 \.\.\. 0, got \[3\]"):
        retrieval_objective(1.0, sources=FIND, layers=[3])(model, batch)
    with pytest.raises(ValueError, match=r"layers must name some of 0 \.\.\. 0, got \[0, 9\]"):
        retrieval_objective(1.0, sources=FIND, layers=[0, 9])(model, batch)
    with (
        pytest.raises(ValueError, match="must have a RetentionMemory in some layer, got Linear"),
        record_memories(nn.Linear(2, 2)),
    ):
        pass


def test_features_of_either_sign_are_refused() -> None:
    model, batch = small_model(feature_map="identity"), batch_of(0)
    with pytest.raises(ValueError, match="memory must have positive features"):
        retrieval_objective(1.0, sources=FIND)(model, batch)
