"""What others put into a model: adapters of peft, quantised layers of bitsandbytes."""

import pytest
import torch
from torch import nn

from tests.models.cases import model_of, tokens
from vort.models import VortForCausalLM


@pytest.mark.parametrize("memory", ["vort", "mixture", "gla", "uniform_power_law"])
def test_gates_are_no_plain_linear_layers(memory: str) -> None:
    """Quantisers take what is of type nn.Linear itself, and choke on layers of two outputs."""
    model = model_of(memory)
    inside = model.model.layers[0].self_attn.memory
    assert not [name for name, x in inside.named_modules() if type(x) is nn.Linear]
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear


@pytest.mark.parametrize("start", ["even", "spread"])
def test_gates_start_as_they_are_told(start: str) -> None:
    model = model_of(initializer_range=0.02, read_start=start)
    gates = model.model.layers[0].self_attn.memory.router.gates
    assert 0.01 < gates.read.weight.std() < 0.03
    assert gates.read.bias.any() == (start == "spread")


@pytest.mark.parametrize("late", [False, True])
def test_peft_knows_where_adapters_go(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    from peft.utils import constants

    for name in dir(constants):
        if name.endswith("_MODULES_MAPPING") and late:  # as if peft had been imported last
            monkeypatch.delitem(getattr(constants, name), "vort", raising=False)
    for config in (peft.LoraConfig, peft.IA3Config, peft.LNTuningConfig):
        model = peft.get_peft_model(model_of(), config(task_type="CAUSAL_LM"))
        ids = tokens(2, 9)
        model(input_ids=ids, labels=ids).loss.backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        assert trained
        assert all(p.grad is not None for p in trained)
        assert model.generate(input_ids=ids, max_new_tokens=2).shape == (2, 11)


class Wrapped(nn.Module):
    """A norm as an adapter wraps it: no weight, no eps of its own."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x)


@torch.no_grad()
def test_a_norm_that_somebody_wrapped_is_called() -> None:
    model, ids = model_of(), tokens(1, 9)
    expected = model(ids).logits
    block = model.model.layers[0]
    block.post_attention_layernorm = Wrapped(block.post_attention_layernorm)
    block.self_attn.norm = Wrapped(block.self_attn.norm)
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("bits", [4, 8])
@torch.no_grad()
def test_bitsandbytes_quantises_and_generates(bits: int, tmp_path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    model, ids = model_of(hidden_size=64), tokens(1, 9)
    model.save_pretrained(tmp_path)
    config = BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    small = VortForCausalLM.from_pretrained(tmp_path, quantization_config=config, device_map="cpu")
    assert type(small.model.layers[0].self_attn.q_proj) is not nn.Linear
    assert (small(ids).logits - model(ids).logits).abs().mean() < model(ids).logits.std()
    assert small.generate(ids, max_new_tokens=3, eos_token_id=None).shape == (1, 12)
