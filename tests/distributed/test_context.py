"""Many processes give the loss curve and the gradients of one."""

from typing import Any

import numpy as np
import pytest

from tests.distributed import jobs
from tests.distributed.processes import run

MEMORIES = (
    *("vort", "mixture", "exponential", "gla", "uniform_power_law", "linear", "gla_scales"),
    "mamba2",
)
KINDS = ("rows", "padded", "packed")
# Constant decays, and learned ones across borders; the others are slow tests.
QUICK = {("vort", "rows"), ("mixture", "packed")}
ALL = [
    pytest.param(memory, kind, marks=() if (memory, kind) in QUICK else pytest.mark.slow)
    for memory in MEMORIES
    for kind in KINDS
]


def check_equal(found: Any, expected: Any) -> None:
    losses, first = found
    wanted, gradients = expected
    assert len(losses) == jobs.STEPS
    assert np.abs(np.subtract(losses, wanted)).max() < 1e-5
    assert wanted[-1] < wanted[0] - 0.1  # it learns, so that a wrong gradient would show
    for name, gradient in gradients.items():
        assert np.abs(first[name] - gradient).max() < 1e-5, name


@pytest.mark.parametrize(("memory", "kind"), ALL)
def test_sequences_cut_over_four_ranks_are_learnt_as_by_one_process(memory: str, kind: str) -> None:
    expected = jobs.alone(memory, kind)
    for found in run(4, jobs.together, "context", memory, kind):
        check_equal(found, expected)


@pytest.mark.parametrize(
    ("way", "ranks", "memory", "kind"),
    [
        ("fsdp_data_context", 4, "vort", "padded"),
        pytest.param("ddp", 2, "vort", "padded", marks=pytest.mark.slow),
        pytest.param("fsdp", 2, "mixture", "rows", marks=pytest.mark.slow),
        pytest.param("ddp_data_context", 4, "gla", "rows", marks=pytest.mark.slow),
        pytest.param("context_checkpointed", 2, "mixture", "rows", marks=pytest.mark.slow),
        pytest.param("fsdp_data_context", 4, "exponential", "rows", marks=pytest.mark.slow),
        pytest.param("fsdp_context", 2, "gla", "packed", marks=pytest.mark.slow),
        pytest.param("ddp", 2, "gla", "rows", marks=pytest.mark.slow),
        pytest.param("ddp", 4, "exponential", "padded", marks=pytest.mark.slow),
        pytest.param("fsdp", 4, "vort", "padded", marks=pytest.mark.slow),
        pytest.param("fsdp_compiled", 2, "vort", "rows", marks=pytest.mark.slow),
        pytest.param("context_compiled", 2, "vort", "rows", marks=pytest.mark.slow),
    ],
)
def test_each_way_over_ranks_learns_as_one_process_does(
    way: str, ranks: int, memory: str, kind: str
) -> None:
    expected = jobs.alone(memory, kind)
    for found in run(ranks, jobs.together, way, memory, kind):
        check_equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"layer_settings": [{"sliding_window": 9, "num_scales": 4}, {"sliding_window": 0}]},
        {"learn_basis": True, "order_input": "values"},
    ],
    ids=str,
)
def test_options_of_layers_and_routers_are_learnt_over_ranks(changes: dict[str, Any]) -> None:
    expected = jobs.alone("vort", "rows", **changes)
    for found in run(2, jobs.together, "context", "vort", "rows", jobs.STEPS, changes):
        check_equal(found, expected)


def test_traffic_is_states_and_halos_and_does_not_know_the_length() -> None:
    config, batch, ranks = jobs.config_of("vort"), 2, 4
    halo = batch * (config.sliding_window - 1 + config.conv_size - 1) * config.hidden_size * 4
    heads, head_dim = config.num_attention_heads, config.head_dim
    features = head_dim
    state = batch * heads * config.num_scales * features * (head_dim + 1) * 4
    for rank, counted in enumerate(run(ranks, jobs.sent, (61, 200), "vort")):
        # Forward to the next rank, gradients to the one before.
        neighbours = (rank < ranks - 1) + (rank > 0)
        for found in counted:
            assert found == {"halo": neighbours * halo, "states": 2 * state, "calls": 4}


def test_however_a_loss_is_asked_for_it_is_that_of_one_process() -> None:
    model, calls = jobs.model_of("vort"), jobs.calls()
    for found in run(2, jobs.answered):
        for name, call in calls.items():
            loss, logits, gradients = jobs.answer(model, call)
            assert abs(found[name][0] - loss) < 1e-5, name
            if "logits_to_keep" in call:
                assert np.abs(found[name][1] - logits.numpy()).max() < 1e-5, name
            for key, gradient in gradients.items():
                assert np.abs(found[name][2][key] - gradient.numpy()).max() < 1e-5, (name, key)


def test_what_cannot_be_cut_is_refused_in_a_line() -> None:
    for said in run(2, jobs.refused):
        assert len(said) == 7
        assert said[0].startswith('mesh must have one dimension, such as mesh["context"], got 2')
        assert "SoftmaxMemory" in said[1]
        assert said[2].startswith("15 tokens are too few for 2 ranks: each must have at least 8")
        assert said[3].startswith("use_cache needs rows of one sequence each")
        assert said[4].startswith("logits_to_keep needs rows of one length, without padding")
        assert said[5].startswith("logits_to_keep must be a number")
        assert said[6].startswith("asked names places of whole rows")
        assert not any("\n" in line for line in said)


@pytest.mark.parametrize(
    ("memory", "ranks"), [("vort", 2), pytest.param("gla", 4, marks=pytest.mark.slow)]
)
def test_a_prompt_read_in_parts_is_gone_on_with_as_if_read_by_one(memory: str, ranks: int) -> None:
    model, prompt = jobs.model_of(memory).eval(), jobs.tokens(2, 61)
    expected = model.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)
    logits = model(prompt, use_cache=False).logits.detach().numpy()
    for found, (part, own) in run(ranks, jobs.generated, memory, 61):
        assert found == expected.tolist()
        assert np.abs(own - logits[:, part]).max() < 1e-5
