import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.memories.cases import NAMES
from tests.models.cases import config_of, model_of, tokens
from vort.models import VortConfig, VortForCausalLM


@pytest.mark.parametrize("memory", [*NAMES, "paper"])
@torch.no_grad()
def test_loading_gives_back_what_was_saved_to_the_bit(memory: str, tmp_path) -> None:
    model, ids = model_of(memory), tokens(2, 30)
    model.save_pretrained(tmp_path)
    torch.manual_seed(99)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


@torch.no_grad()
def test_untied_embeddings_are_saved_both(tmp_path) -> None:
    model, ids = model_of(tie_word_embeddings=False), tokens(1, 9)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    assert torch.equal(VortForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)
    tied = model_of()
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


@torch.no_grad()
def test_half_precision_is_kept_for_weights_and_not_for_rates(tmp_path) -> None:
    model_of().save_pretrained(tmp_path)
    loaded = VortForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.model.embed_tokens.weight.dtype == torch.bfloat16
    router = loaded.model.layers[0].self_attn.memory.router
    assert router.log_decay(torch.device("cpu")).dtype == torch.float32


@pytest.mark.parametrize("damage", ["cut", "scrambled", "empty"])
def test_a_damaged_file_is_refused_in_words(damage: str, tmp_path) -> None:
    model_of().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    damaged = {"cut": data[: len(data) // 2], "scrambled": b"\xff" * len(data), "empty": b""}
    path.write_bytes(damaged[damage])
    with pytest.raises(OSError, match=r"model\.safetensors.*(damaged|incomplete)"):
        VortForCausalLM.from_pretrained(tmp_path)


def test_initial_weights_are_the_layers_own() -> None:
    model = VortForCausalLM(config_of(initializer_range=0.02))
    order = model.model.layers[0].self_attn.memory.router.order
    torch.testing.assert_close(torch.sigmoid(order.bias), torch.tensor([0.25, 0.95]))
    assert 0.01 < model.model.embed_tokens.weight.std() < 0.03


def test_a_saved_model_keeps_its_width_whatever_it_was_matched_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = VortForCausalLM(VortConfig(memory="none", **settings))
    model.save_pretrained(tmp_path)
    # Another version has other defaults, and would match with another size.
    monkeypatch.setattr("vort.models.block._parameters_of_attention", lambda config: 0)
    loaded = VortForCausalLM.from_pretrained(tmp_path)
    width = loaded.model.layers[0].mlp.up_proj.out_features
    assert width == model.model.layers[0].mlp.up_proj.out_features
    assert width != VortConfig(**settings).intermediate_size


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("memory", ["vort", "paper"])
def test_a_missing_tensor_is_refused_and_named(memory: str, tmp_path: Path) -> None:
    model_of(memory).save_pretrained(tmp_path)
    name = "model.layers.0.self_attn." + (
        "memory.key_map.projection" if memory == "paper" else "q_proj.weight"
    )
    rewritten(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(OSError, match=rf"incomplete: .* 1 are missing, {name} first"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_more_layers_than_weights_are_refused(tmp_path: Path) -> None:
    model_of().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(OSError, match=r"missing, model\.layers\.2\..* first"):
        VortForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(value: float, tmp_path: Path) -> None:
    model_of().save_pretrained(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    rewritten(tmp_path, lambda tensors: tensors[name][0, :1].fill_(value))
    with pytest.raises(OSError, match=f"not all finite numbers: see {name}"):
        VortForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json"])
def test_a_pipe_in_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    model_of().save_pretrained(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(OSError, match=rf"{name} is no regular file"):
        VortForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(OSError, match=rf"{name} is no regular file"):
        VortConfig.from_pretrained(tmp_path)


def test_loading_information_is_there_for_those_who_ask(tmp_path: Path) -> None:
    model_of().save_pretrained(tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    rewritten(tmp_path, lambda tensors: tensors.pop(name))
    model, found = VortForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(model, VortForCausalLM)
    assert set(found["missing_keys"]) == {name}


def test_a_model_made_on_the_meta_device_gets_all_its_numbers() -> None:
    """FAVOR+ has a random projection and no parameters: nothing else would draw it."""
    with torch.device("meta"):
        model = VortForCausalLM(config_of("paper"))
    maps = model.model.layers[0].self_attn.memory.key_map
    assert maps.projection.is_meta
    model.to_empty(device="cpu")
    assert maps.projection.isfinite().all()
    assert 0.5 < maps.projection.std() < 2
    for module in model.modules():
        module._is_hf_initialized = False
    model.init_weights()
    assert all(x.isfinite().all() for x in model.state_dict().values())
    drawn = maps.projection.clone()
    model.double()
    assert torch.equal(maps.projection, drawn.double())
