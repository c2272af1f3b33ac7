from pathlib import Path

import pytest
import torch
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
    monkeypatch.setattr("vort.models.modeling_vort._parameters_of_attention", lambda config: 0)
    loaded = VortForCausalLM.from_pretrained(tmp_path)
    width = loaded.model.layers[0].mlp.up_proj.out_features
    assert width == model.model.layers[0].mlp.up_proj.out_features
    assert width != VortConfig(**settings).intermediate_size
