"""Decay where it belongs, and the rate of each step."""

import pytest
import torch
from torch import nn

from tests.lab.training.tiny import quick, tiny
from vort.lab.training.setup import decays, learning_rate_at, make_optimizer


@pytest.mark.parametrize("memory", ["vort", "exponential", "mixture", "uniform_power_law", "gla"])
def test_norms_biases_gates_rates_and_routers_do_not_decay(memory: str) -> None:
    models = pytest.importorskip("vort.models")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    found = decays(models.VortForCausalLM(models.VortConfig(memory=memory, **sizes)))
    for name, decay in found.items():
        wanted = name.endswith("_proj.weight") or "embed_tokens" in name or "lm_head" in name
        assert decay == wanted, name


def test_every_learning_parameter_is_in_one_group() -> None:
    model = tiny()
    model.head.bias.requires_grad_(False)
    groups = make_optimizer(model, quick()).param_groups
    found = [id(x) for group in groups for x in group["params"]]
    assert sorted(found) == sorted(id(x) for x in model.parameters() if x.requires_grad)
    assert sorted(group["weight_decay"] for group in groups) == [0.0, 0.1]


def test_a_model_that_cannot_learn_is_refused() -> None:
    with pytest.raises(ValueError, match="model must have parameters"):
        make_optimizer(nn.Module(), quick())


def test_the_learning_rate_rises_and_falls_between_its_ends() -> None:
    config = quick(steps=200, learning_rate=2.0, warmup=0.1, final_fraction=0.05)
    rates = torch.tensor([learning_rate_at(step, 200, config) for step in range(200)])
    assert rates[19] == rates.max() == 2.0
    assert (rates[:20].diff() > 0).all()
    assert (rates[20:].diff() <= 0).all()
    assert rates[-1] == pytest.approx(0.1)
    assert rates[0] == pytest.approx(0.1)


def test_no_warm_up_and_single_steps_are_fine() -> None:
    assert learning_rate_at(0, 1, quick(warmup=0.0, learning_rate=1.0)) == 1.0
    assert learning_rate_at(0, 1, quick(warmup=1.0, learning_rate=1.0)) == 1.0
