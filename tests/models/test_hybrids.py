"""Models whose layers have different memories: one layer in four with full attention, say."""

import json
from typing import Any

import pytest
import torch

from tests.models.cases import config_of, model_of, tokens
from vort.memories import MEMORIES, GatedLinearMemory, SoftmaxMemory, VortMemory
from vort.models import VortConfig, VortForCausalLM, VortSession

PATTERN = ["vort", "vort", "vort", "softmax"]


def hybrid(names: list[str], **changes: Any) -> VortForCausalLM:
    return model_of(names[0], **{"num_hidden_layers": 4, "layer_memories": names, **changes})


def test_a_pattern_is_begun_anew_until_all_layers_have_a_memory() -> None:
    model = hybrid(["vort", "softmax"], num_hidden_layers=5)
    kinds = [type(memory) for memory in model.model.memories]
    assert kinds == [VortMemory, SoftmaxMemory, VortMemory, SoftmaxMemory, VortMemory]


def test_one_name_for_all_layers_is_the_model_without_a_list() -> None:
    plain, listed = model_of("gla"), model_of("gla", layer_memories=["gla"])
    for (name, ours), (other, theirs) in zip(
        plain.state_dict().items(), listed.state_dict().items(), strict=True
    ):
        assert name == other
        assert torch.equal(ours, theirs)


def test_a_saved_hybrid_is_the_same_when_loaded(tmp_path) -> None:
    model = hybrid(["gla", "softmax"])
    model.save_pretrained(tmp_path)
    loaded = VortForCausalLM.from_pretrained(tmp_path).eval()
    assert [type(memory) for memory in loaded.model.memories][:2] == [
        GatedLinearMemory,
        SoftmaxMemory,
    ]
    given = tokens(2, 20)
    torch.testing.assert_close(loaded(given).logits, model(given).logits)


def test_a_configuration_without_a_list_has_one_memory_for_all(tmp_path) -> None:
    config_of("mixture").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text())
    settings.pop("layer_memories", None)
    path.write_text(json.dumps(settings))
    config = VortConfig.from_pretrained(tmp_path)
    assert config.layer_memories is None
    assert {config.memory_of(layer) for layer in range(2)} == {"mixture"}


@pytest.mark.parametrize("other", ["vort", "gla", "mamba2", "gated_delta"])
@torch.no_grad()
def test_a_cache_changes_nothing_in_a_hybrid(other: str) -> None:
    model, given = hybrid([other, "softmax"]), tokens(2, 24)
    whole = model(given).logits
    cache = model.new_cache()
    assert cache.grows
    pieces = [slice(0, 9), *(slice(t, t + 1) for t in range(9, 24))]
    parts = [model(given[:, x], past_key_values=cache, use_cache=True).logits for x in pieces]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-4, rtol=1e-4)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    cached, again = (model.generate(given, **options, use_cache=use) for use in (True, False))
    assert torch.equal(cached, again)


@torch.no_grad()
def test_padding_changes_nothing_in_a_hybrid() -> None:
    model, given = hybrid(PATTERN), tokens(1, 15)
    mask = torch.ones(1, 20, dtype=torch.long)
    mask[:, :5] = 0
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), given], 1)
    found = model(padded, attention_mask=mask).logits[:, 5:]
    torch.testing.assert_close(found, model(given).logits, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_session_of_a_hybrid_goes_on_after_the_disk(tmp_path) -> None:
    session = VortSession(hybrid(PATTERN))
    session.feed(tokens(1, 20)[0].tolist())
    session.save(tmp_path / "session.safetensors")
    loaded = VortSession.load(tmp_path / "session.safetensors", session.model)
    said = [list(each.generate(5, temperature=0, stop=())) for each in (loaded, session)]
    assert said[0] == said[1]


@pytest.mark.parametrize("name", [name for name in MEMORIES if name not in ("exact_power_law",)])
def test_a_hybrid_has_as_many_parameters_as_the_default(name: str) -> None:
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 4}
    with torch.device("meta"):
        count, wanted = (
            sum(x.numel() for x in VortForCausalLM(VortConfig(**sizes, **more)).parameters())
            for more in ({"layer_memories": [name, name, name, "softmax"]}, {})
        )
    assert abs(count / wanted - 1) < 0.01


def test_a_horizon_is_set_where_there_is_one() -> None:
    model = hybrid(PATTERN)
    model.model.set_horizon(4000)
    assert model.config.horizon == 4000
    assert [getattr(m, "router", None) and m.router.horizon for m in model.model.memories] == [
        4000,
        4000,
        4000,
        None,
    ]
    with pytest.raises(TypeError, match="set_horizon needs a memory with orders"):
        hybrid(["gla", "softmax"]).model.set_horizon(4000)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_memories": ["vort", "lstm"]}, r"layer_memories must be one of vort, .*'lstm'"),
        ({"layer_memories": []}, "layer_memories must name 1 to 4 memories.*got 0"),
        ({"layer_memories": ["vort"] * 5}, "layer_memories must name 1 to 4 memories.*got 5"),
        (
            {"memory": "mixture", "layer_memories": ["vort", "softmax"]},
            "memory must be among layer_memories .'vort', 'softmax'., or left out, got 'mixture'",
        ),
    ],
)
def test_what_cannot_be_meant_is_an_error_in_a_line(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        VortConfig(**settings)
    assert "\n" not in str(error.value)


def test_the_first_name_is_the_memory_where_none_is_given() -> None:
    assert VortConfig(layer_memories=["gla", "softmax"]).memory == "gla"
    assert VortConfig(layer_memories=["softmax", "vort"]).memory == "vort"


def test_half_states_of_a_hybrid_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="got memory 1 x vort, 1 x softmax, in turn"):
        hybrid(["vort", "softmax"]).model.new_cache(state_dtype=torch.bfloat16)
