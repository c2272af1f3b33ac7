"""Models whose layers differ in scales, horizons, features or windows."""

from typing import Any

import pytest
import torch

from tests.models.cases import WINDOW, config_of, model_of, tokens
from vort.distributed.context import halo_size
from vort.models import VortConfig, VortForCausalLM, VortSession
from vort.models.tensor_parallel import tensor_parallel_plan

SCALES = [{"num_scales": 4}, {"num_scales": 6, "num_features": 8}]
WINDOWS = [{"sliding_window": 0}, {}]
HORIZONS = [{"horizon": 2048}, {}]


def of(own: list[dict[str, int]], **changes: Any) -> VortForCausalLM:
    return model_of("vort", **{"num_hidden_layers": 4, "layer_settings": own, **changes})


def test_layers_have_what_they_are_given_and_the_rest_from_the_model() -> None:
    layers = [block.self_attn for block in of([*SCALES, {"sliding_window": 3}]).model.layers]
    assert [layer.memory.num_scales for layer in layers] == [4, 6, 8, 4]
    assert [layer.memory.key_map.output_dim for layer in layers] == [16, 8, 16, 16]
    assert [layer.window for layer in layers] == [WINDOW, WINDOW, 3, WINDOW]
    horizons = [memory.router.horizon for memory in of(HORIZONS).model.memories]
    assert horizons == [2048, 1000, 2048, 1000]


@pytest.mark.parametrize("own", [[{}], [{"num_scales": 8}], [{"sliding_window": WINDOW}, {}]])
def test_what_layers_have_in_common_may_be_said_by_layer(own: list[dict[str, int]]) -> None:
    plain, listed = model_of("vort"), model_of("vort", layer_settings=own)
    assert plain.state_dict().keys() == listed.state_dict().keys()
    given = tokens(2, 20)
    assert torch.equal(plain(given).logits, listed(given).logits)


@pytest.mark.parametrize("own", [SCALES, WINDOWS, HORIZONS], ids=["scales", "windows", "horizons"])
@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_a_cache_changes_nothing(own: list[dict[str, int]], static: bool) -> None:
    model, given = of(own), tokens(2, 24)
    whole = model(given).logits
    cache = model.new_cache(static=static)
    pieces = [slice(0, 9), *(slice(t, t + 1) for t in range(9, 24))]
    parts = [model(given[:, x], past_key_values=cache, use_cache=True).logits for x in pieces]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "changes", [{}, {"learn_basis": True, "order_input": "values", "order_start": [0.3, 0.7]}]
)
@torch.no_grad()
def test_padding_packing_and_steps_change_nothing(changes: dict[str, Any]) -> None:
    model, given = of([{"num_scales": 4, "sliding_window": 0}, {}], **changes), tokens(1, 15)
    expected = model(given).logits
    mask = torch.ones(1, 20, dtype=torch.long)
    mask[:, :5] = 0
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), given], 1)
    found = model(padded, attention_mask=mask).logits[:, 5:]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    cache = model.new_cache()
    steps = [model(x, past_key_values=cache, use_cache=True).logits for x in given.split(1, 1)]
    torch.testing.assert_close(torch.cat(steps, 1), expected, atol=1e-4, rtol=1e-4)
    packed = torch.cat([tokens(1, 7, seed=1), given], 1)
    found = model(packed, cu_seqlens=torch.tensor([0, 7, 22]), use_cache=False).logits[:, 7:]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_saved_model_and_a_session_come_back(tmp_path: Any) -> None:
    own = [{"num_scales": 4}, {"sliding_window": 0}]
    model, given = of(own, learn_basis=True, order_start=[0.3, 0.7]), tokens(2, 20)
    torch.nn.init.normal_(model.model.memories[1].router.log_factor)
    model.save_pretrained(tmp_path)
    loaded = VortForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config.layer_settings == model.config.layer_settings
    torch.testing.assert_close(loaded(given).logits, model(given).logits)
    session = VortSession(model)
    session.feed(given[0].tolist())
    session.save(tmp_path / "session.safetensors")
    again = VortSession.load(tmp_path / "session.safetensors", loaded)
    said = [list(each.generate(5, temperature=0, stop=())) for each in (again, session)]
    assert said[0] == said[1]


def test_layers_that_differ_leave_the_model_as_large() -> None:
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 4}
    with torch.device("meta"):
        count, wanted = (
            sum(x.numel() for x in VortForCausalLM(VortConfig(**sizes, **more)).parameters())
            for more in ({"layer_settings": [{"num_scales": 2}, {"num_features": 128}]}, {})
        )
    assert abs(count / wanted - 1) < 0.01


def test_a_horizon_of_its_own_stays_when_the_models_is_set() -> None:
    model = of(HORIZONS)
    model.model.set_horizon(4096)
    assert [memory.router.horizon for memory in model.model.memories] == [2048, 4096] * 2
    assert model.config.horizon == 4096
    with pytest.raises(ValueError, match="a layer without a horizon of its own"):
        of([{"horizon": 2048}]).model.set_horizon(4096)


def test_sequences_and_heads_are_dealt_out_with_all_layers_in_mind() -> None:
    assert halo_size(of(WINDOWS).model) == WINDOW - 1 + 3
    assert halo_size(of([{}, {"sliding_window": 9}]).model) == 9 - 1 + 3
    plan = tensor_parallel_plan(config_of(layer_settings=SCALES))
    assert plan is None or not any("self_attn" in name for name in plan)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ([], "layer_settings must be of 1 to 2 layers.*got 0"),
        ([{}] * 3, "layer_settings must be of 1 to 2 layers.*got 3"),
        ([{"num_scale": 4}], "layer_settings .*num_scale.*num_scales"),
        ([{"conv_size": 4}], "layer_settings .*conv_size"),
        ([{"num_scales": 0}], "num_scales must be at least 1, got 0"),
        ([{"sliding_window": -1}], "sliding_window must be at least 1"),
    ],
)
def test_what_no_layer_can_have_is_refused(own: list[dict[str, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(layer_settings=own)
