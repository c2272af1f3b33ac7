import copy
import json
from dataclasses import fields

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models.cases import config_of, model_of, tokens
from vort.memories import PAPER, LayerSettings
from vort.models import VortConfig, VortForCausalLM


def test_unknown_settings_are_an_error_that_helps() -> None:
    with pytest.raises(ValueError, match="no setting 'hiden_size'; did you mean hidden_size"):
        VortConfig(hiden_size=64)
    with pytest.raises(ValueError, match="no setting 'zzz'"):
        VortConfig(zzz=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("memory", "lstm"), ("routing", "best"), ("feature_map", "cosine"), ("normalizer", "sum")],
)
def test_a_wrong_choice_names_the_right_ones(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be one of .*, got '{value}'"):
        VortConfig(**{name: value})


def test_a_wrong_type_is_an_error() -> None:
    with pytest.raises(Exception, match="hidden_size"):
        VortConfig(hidden_size="wide")


@pytest.mark.parametrize("value", [0, -5])
@pytest.mark.parametrize("name", ["vocab_size", "intermediate_size", "mlp_size"])
def test_sizes_of_nothing_are_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got {value}"):
        config_of(**{name: value})


def test_derived_sizes() -> None:
    config = VortConfig(hidden_size=96, num_attention_heads=3)
    assert (config.head_dim, config.num_key_value_heads) == (32, 3)
    assert config.intermediate_size == 256


def test_a_configuration_survives_the_disk(tmp_path) -> None:
    config = config_of("mixture", horizon=4096, read_weights=False, rope_theta=None)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(loaded, VortConfig)
    ours, theirs = (json.loads(c.to_json_string(use_diff=False)) for c in (config, loaded))
    for entry in (ours, theirs):
        entry.pop("_name_or_path", None)
    assert ours == theirs


@pytest.mark.parametrize("gate", [True, False])
def test_a_saved_model_says_whether_it_has_an_output_gate(gate: bool, tmp_path) -> None:
    model_of(output_gate=gate).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["output_gate"] == gate
    loaded = VortForCausalLM.from_pretrained(tmp_path)
    assert (loaded.model.layers[0].self_attn.g_proj is not None) == gate


def test_a_saved_model_says_where_reading_begins(tmp_path) -> None:
    for start in (None, "even", "spread"):
        model_of(read_start=start).save_pretrained(tmp_path)
        assert VortConfig.from_pretrained(tmp_path).read_start == start


def test_a_folder_from_before_the_gate_was_the_default_loads_as_it_was(tmp_path) -> None:
    assert VortConfig().output_gate
    model, given = model_of(output_gate=False), tokens(1, 12)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text())
    # Settings of today that an old file cannot have.
    for name in ("output_gate", "layer_settings", "learn_basis", "order_input", "read_start"):
        del settings[name]
    path.write_text(json.dumps(settings))
    for loaded in (VortForCausalLM, AutoModelForCausalLM):
        found = loaded.from_pretrained(tmp_path).eval()
        assert not found.config.output_gate
        assert found.config.read_start == "even"
        torch.testing.assert_close(found(given).logits, model(given).logits)
    assert VortConfig.from_pretrained(tmp_path, output_gate=True).output_gate


def test_a_slip_in_a_saved_configuration_is_an_error(tmp_path) -> None:
    config_of().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"horizon"', '"horizont"'))
    with pytest.raises(ValueError, match="horizont"):
        VortConfig.from_pretrained(tmp_path)


def test_the_paper_configuration_is_the_paper() -> None:
    config = VortConfig.paper()
    assert config.routing == "banks"
    assert (config.num_banks, config.num_scales, config.num_features) == (10, 15, 64)
    assert config.feature_map == "favor"
    assert config.use_entropy
    assert config.use_entity
    additions = (config.read_weights, config.write_gate, config.output_gate, config.output_norm)
    assert not any((*additions, config.qk_norm, config.conv_size))
    # What the paper has not, whatever the defaults are: all that it leaves open is as elsewhere.
    plain = {"learn_basis": False, "order_input": "hidden", "normalizer": "decayed"}
    plain |= {"include_self": True, "layer_memories": None, "layer_settings": None}
    assert {name: getattr(config, name) for name in plain} == plain
    assert (config.num_hidden_layers, config.horizon, config.memory) == (1, 10_000, "vort")
    open_to_us = {x.name: getattr(config, x.name) for x in fields(LayerSettings)}
    changed = {name for name, value in open_to_us.items() if value != getattr(VortConfig(), name)}
    assert changed <= set(PAPER)
    assert VortConfig.paper(num_banks=8).num_banks == 8
    layer = model_of("paper").model.layers[0].self_attn
    assert layer.memory.num_scales == (3 - 1) * 5 + 1


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 0},
        {"hidden_size": 10**9},
        {"vocab_size": 10**15},
        {"num_scales": 10**15},
    ],
    ids=str,
)
def test_sizes_that_nobody_means_are_refused_before_anything_is_built(sizes, tmp_path) -> None:
    with pytest.raises(ValueError, match="num_hidden_layers") as refused:
        VortConfig(**sizes)
    assert "\n" not in str(refused.value)
    config_of().save_pretrained(tmp_path)
    entry = json.loads((tmp_path / "config.json").read_text()) | sizes
    (tmp_path / "config.json").write_text(json.dumps(entry))
    with pytest.raises(ValueError, match="num_hidden_layers"):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["rope_theta", "exponential_rate", "rms_norm_eps"])
def test_a_whole_number_is_a_number(name: str) -> None:
    value = getattr(VortConfig(memory="exponential", **{name: 10000}), name)
    assert value == 10000
    assert isinstance(value, float)
    assert isinstance(getattr(LayerSettings(**{name: 10000}), name), float)
    assert VortConfig(initializer_range=1).initializer_range == 1


def test_an_attribute_that_somebody_adds_is_saved_and_comes_back(tmp_path) -> None:
    config = config_of()
    config.a_tool_was_here = {"version": 3}
    for _ in range(2):
        config.save_pretrained(tmp_path)
        config = AutoConfig.from_pretrained(tmp_path)
        assert config.a_tool_was_here == {"version": 3}
    assert copy.deepcopy(config).a_tool_was_here == {"version": 3}


def test_what_is_ignored_at_inference_is_a_list() -> None:
    assert isinstance(VortConfig.keys_to_ignore_at_inference, list)  # Trainer adds lists to it


def test_attentions_are_refused_by_the_configuration_too() -> None:
    with pytest.raises(ValueError, match="output_attentions must be off"):
        config_of(output_attentions=True)
