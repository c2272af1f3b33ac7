import pytest
import torch

from tests.memories.cases import NAMES
from tests.models.cases import config_of, model_of
from vort.models import VortConfig, VortForCausalLM
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
    with torch.device("meta"):
        expected = model_of(hidden_size=size).num_parameters()
    for memory in (*NAMES, "paper"):
        with torch.device("meta"):
            model = model_of(memory, hidden_size=size, num_hidden_layers=2, **options)
        count = model.num_parameters()
        assert abs(count / expected - 1) < 0.02, (memory, count, expected)


def test_matching_can_be_switched_off() -> None:
    bare = model_of("none", match_parameters=False)
    assert bare.model.layers[0].mlp.up_proj.out_features == bare.config.intermediate_size


def test_a_seed_gives_the_weights_that_results_were_made_with() -> None:
    """FAVOR+ draws wherever it is built, and so does counting parameters: how often must stay."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    sizes |= {"sliding_window": 8, "vocab_size": 300}
    config = VortConfig(**sizes, feature_map="favor", output_gate=False)
    layer = VortForCausalLM(config).model.layers[0].self_attn
    projection = layer.memory.key_map.projection
    assert projection[0, :2].tolist() == pytest.approx([0.1379249, 1.0385739], rel=1e-5)
    assert layer.q_proj.weight[0, :2].tolist() == pytest.approx([0.0088474, -0.0067595], rel=1e-4)
