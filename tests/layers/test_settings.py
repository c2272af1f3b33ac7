"""Settings are spelled once and carried to the end: none is lost on its way to the layer."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from tests.layers.cases import HIDDEN, SIZES
from vort.lab.experiments.models import MODELS, model_config
from vort.lab.tasks import make_task
from vort.layers import LayerStates, VortAttention
from vort.memories import MEMORIES, PAPER, LayerSettings
from vort.models import VortConfig, VortModel

NAMES = [field.name for field in fields(LayerSettings)]
# For each setting another value, and the settings under which it matters.
CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "hidden_size": (32, {}),
    "num_attention_heads": (4, {}),
    "num_key_value_heads": (1, {}),
    "head_dim": (4, {}),
    "sliding_window": (3, {}),
    "rope_theta": (None, {}),
    "memory": ("gla", {}),
    "routing": ("banks", {}),
    "horizon": (500, {}),
    "num_scales": (6, {}),
    "num_banks": (4, {"routing": "banks"}),
    "order_min": (0.2, {}),
    "order_start": (0.6, {}),
    "order_input": ("values", {}),
    "order_per_head": (True, {"memory": "uniform_power_law"}),
    "feature_map": ("elu", {}),
    "num_features": (4, {}),
    "normalizer": ("none", {}),
    "include_self": (False, {}),
    "use_entropy": (False, {}),
    "use_entity": (True, {}),
    "write_gate": (False, {}),
    "write_gain": ("token", {"memory": "mixture"}),
    "read_weights": (False, {}),
    "read_start": ("even", {}),
    "conv_size": (3, {}),
    "qk_norm": (False, {}),
    "output_norm": (False, {}),
    "output_gate": (False, {}),
    "learn_rates": (False, {"memory": "exponential"}),
    "learn_basis": (True, {}),
    "leak": (True, {}),
    "exponential_rate": (0.3, {"memory": "exponential"}),
    "rates_start": ("basis", {"memory": "mixture"}),
    "softmax_cache_size": (4, {"memory": "softmax"}),
    "softmax_heavy_hitters": (4, {"memory": "softmax"}),
    "attention_bias": (True, {}),
    "rms_norm_eps": (0.1, {}),
}


@torch.no_grad()
def behaviour(layer: VortAttention) -> list[Any]:
    """All that one can see of a layer: its parameters, its output, its state."""
    generator, states = torch.Generator().manual_seed(0), LayerStates()
    x = torch.randn(1, 12, layer.q_proj.in_features, generator=generator)
    marks = torch.ones(1, 12) if layer.memory.needs_entity else None
    output, _ = layer.eval()(x, entity_mask=marks, past_key_values=states, use_cache=True)
    parameters = [(name, p.requires_grad, p.tolist()) for name, p in layer.named_parameters()]
    kept = {name: x.shape for name, x in states.load_state(0).items()}
    return [parameters, output.tolist(), kept, layer.state_size(50)]


def layer_with(**settings: Any) -> VortAttention:
    torch.manual_seed(0)
    return VortAttention(**{**SIZES, "horizon": 1000, **settings})


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_reaches_the_layer(name: str) -> None:
    value, others = CHANGES[name]
    assert behaviour(layer_with(**others)) == behaviour(layer_with(**others))
    assert behaviour(layer_with(**others)) != behaviour(layer_with(**{**others, name: value}))


@pytest.mark.parametrize("name", NAMES)
def test_a_model_has_the_settings_of_a_layer_with_their_defaults(name: str) -> None:
    assert getattr(VortConfig(), name) == getattr(LayerSettings(), name)
    value, others = CHANGES[name]
    changed = {**SIZES, "horizon": 1000, **others, name: value}
    assert getattr(VortConfig(**changed), name) == value
    torch.manual_seed(0)
    of_model = VortAttention(VortConfig(**changed))
    torch.manual_seed(0)
    assert behaviour(of_model) == behaviour(VortAttention(**changed))


def test_the_layer_of_a_default_model_is_the_default_layer() -> None:
    model = VortModel(VortConfig(num_hidden_layers=1, vocab_size=300))
    assert str(model.layers[0].self_attn) == str(VortAttention())


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_memory_takes_settings_whole_or_by_name(memory: str) -> None:
    options = {**SIZES, "memory": memory, "read_weights": False, "horizon": 1000}
    made = [MEMORIES[memory](LayerSettings(**options)), MEMORIES[memory](**options)]
    assert str(made[0]) == str(made[1])
    assert isinstance(VortAttention(**options).memory, MEMORIES[memory])


@pytest.mark.parametrize(
    "name", ["head_dim", "horizon", "num_features", "num_scales", "softmax_cache_size"]
)
def test_what_is_out_of_range_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.* at least"):
        LayerSettings(**{name: 0})


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta", "exponential_rate"])
def test_a_number_that_would_make_all_others_none_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be positive and finite, got"):
        LayerSettings(**{name: value})


OF_ONE_MEMORY = {
    "order_per_head": True,
    "exponential_rate": 0.1,
    "softmax_cache_size": 4,
    "softmax_heavy_hitters": 4,
}


@pytest.mark.parametrize("name", OF_ONE_MEMORY)
def test_a_setting_of_one_memory_is_refused_where_there_is_another(name: str) -> None:
    given, memory = {name: OF_ONE_MEMORY[name]}, CHANGES[name][1]["memory"]
    for make in (VortAttention, VortConfig):
        with pytest.raises(ValueError, match=f"{name} is for memory='{memory}', got memory='vort'"):
            make(**SIZES, **given)
        make(**SIZES, **given, memory=memory)
    with pytest.raises(ValueError, match="got memory='gla' and 'vort'"):
        VortConfig(**SIZES, **given, num_hidden_layers=2, layer_memories=["vort", "gla"])
    VortConfig(**SIZES, **given, num_hidden_layers=2, layer_memories=["vort", memory])


def test_a_memory_of_ones_own_may_take_settings_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(MEMORIES["softmax"]):  # type: ignore[misc]
        pass

    monkeypatch.setitem(MEMORIES, "own", Own)
    for make in (VortAttention, VortConfig):
        make(**SIZES, memory="own", softmax_cache_size=4)


def test_numbers_are_of_their_kinds() -> None:
    layer = VortAttention(hidden_size=np.int64(16), num_attention_heads=2.0)
    assert (layer.num_heads, layer.head_dim) == (2, 8)
    with pytest.raises(TypeError, match="hidden_size must be a whole number, got '32'"):
        VortAttention(hidden_size="32", num_attention_heads=2)
    with pytest.raises(TypeError, match=r"conv_size must be a whole number, got 2\.5"):
        VortAttention(**SIZES, conv_size=2.5)


def test_as_printed_means_the_same_everywhere() -> None:
    layer, config = VortAttention.paper(**SIZES), VortConfig.paper(**SIZES)
    assert str(layer) == str(VortAttention(config))
    row = MODELS["vort_paper"].settings
    assert {name: PAPER[name] for name in row} == row
    # What the row leaves out are sizes, inputs of the router and the output gate, which a table
    # sets for all rows.
    left = {name: value for name, value in PAPER.items() if name not in row}
    assert {name for name, value in left.items() if value != getattr(LayerSettings(), name)} == {
        "horizon",
        "num_features",
        "num_scales",
        "output_gate",
        "use_entity",
    }
    assert not model_config(make_task("zipf_retrieval"), row).output_gate
    assert layer.q_proj.in_features == HIDDEN
