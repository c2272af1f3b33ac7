import pytest
import torch

from tests.memories.cases import NAMES
from tests.models.cases import config_of, model_of
from vort.models.block import VortBlock

OPTIONS = (
    {},
    {"num_scales": 12},
    {"feature_map": "hedgehog"},
    {"write_gate": False, "read_weights": False},
    {"output_gate": True, "conv_size": 0},
)


@torch.no_grad()
def test_a_block_adds_attention_and_mlp_each_after_its_norm() -> None:
    torch.manual_seed(0)
    block, x, delta = VortBlock(config_of(), 0), torch.randn(2, 9, 32), torch.randn(2, 9, 32)
    middle = x + delta
    middle = middle + block.self_attn(block.input_layernorm(middle))[0]
    expected = middle + block.mlp(block.post_attention_layernorm(middle))
    assert torch.equal(block(x, delta)[0], expected)
    hidden, left, _ = block.deferred(x, delta)
    assert torch.equal(hidden if left is None else hidden + left, expected)


@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_models_have_equally_many_parameters(options: dict[str, object], size: int) -> None:
    expected = model_of(hidden_size=size).num_parameters()
    for memory in (*NAMES, "paper"):
        count = model_of(memory, hidden_size=size, num_hidden_layers=2, **options).num_parameters()
        assert abs(count / expected - 1) < 0.02, (memory, count, expected)


def test_matching_can_be_switched_off() -> None:
    bare = model_of("none", match_parameters=False)
    assert bare.model.layers[0].mlp.up_proj.out_features == bare.config.intermediate_size
