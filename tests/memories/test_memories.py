import pytest
import torch
from torch import Tensor

from vort.memories import (
    MEMORIES,
    ExponentialMemory,
    Memory,
    MemoryInputs,
    MemorySettings,
    SoftmaxMemory,
    UniformPowerLawMemory,
    build_memory,
)
from vort.ops.feature_maps import elu_features

SETTINGS = MemorySettings(hidden_size=16, num_heads=2, head_dim=8, horizon=1000, use_entropy=True)


def inputs(length: int = 12, kv_heads: int = 2) -> MemoryInputs:
    torch.manual_seed(1)
    q, k = torch.randn(2, length, 2, 8), torch.randn(2, length, kv_heads, 8)
    v = torch.randn(2, length, kv_heads, 8)
    return MemoryInputs(torch.randn(2, length, 16), q, k, v, torch.rand(2, length, 2))


def made(name: str, **changes: object) -> Memory:
    torch.manual_seed(0)
    return build_memory(name, MemorySettings(**{**vars(SETTINGS), **changes}))


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("name", MEMORIES)
@torch.no_grad()
def test_steps_equal_forward(name: str, kv_heads: int) -> None:
    memory, given = made(name, num_key_value_heads=kv_heads), inputs(kv_heads=kv_heads)
    whole = memory(given, output_state=True)
    state, outputs = None, []
    for position in range(given.q.shape[1]):
        found = memory.step(given.at(position), state)
        outputs.append(found.output)
        state = found.state
    torch.testing.assert_close(torch.cat(outputs, 1), whole.output, atol=1e-5, rtol=1e-4)
    assert state.keys() == whole.state.keys()
    for key, value in whole.state.items():
        torch.testing.assert_close(state[key].float(), value.float(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", MEMORIES)
@torch.no_grad()
def test_state_size_is_what_is_kept(name: str) -> None:
    memory, given = made(name), inputs(length=9)
    state = memory(given, output_state=True).state
    # `seen` counts positions; it is not memory.
    kept = sum(x[0].numel() for key, x in state.items() if key != "seen")
    assert kept == memory.state_size(9)


def test_step_takes_one_position() -> None:
    with pytest.raises(ValueError, match="step takes one position, got 12"):
        made("vort").step(inputs())


def test_only_softmax_grows() -> None:
    growing = [name for name in MEMORIES if made(name).state_size(10) != made(name).state_size(20)]
    assert growing == ["softmax"]
    assert made("softmax", cache_size=4).state_size(20) == 2 * 4 * 2 * 8


@torch.no_grad()
def test_softmax_is_causal_attention_with_and_without_a_cache() -> None:
    memory, given = SoftmaxMemory(2, 8, rope_base=None), inputs()
    scores = torch.einsum("bthd,bihd->bhti", given.q, given.k) / 8**0.5
    future = torch.ones(12, 12).triu(1).bool()
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    expected = torch.einsum("bhti,bihd->bthd", weights, given.v)
    torch.testing.assert_close(memory(given).output, expected)
    cached = memory(given, output_state=True)
    torch.testing.assert_close(cached.output, expected)


def decayed_average(given: MemoryInputs, kernel: Tensor) -> Tensor:
    """Σ_i kernel[t-i] (φ(q_t)·φ(k_i)) v_i over the same with v = 1."""
    lag = torch.arange(12)[:, None] - torch.arange(12)
    similarity = torch.einsum("bthd,bihd->bhti", elu_features(given.q), elu_features(given.k))
    weights = similarity * kernel[..., lag.clamp(min=0)] * (lag >= 0)
    return torch.einsum("bhti,bihd->bthd", weights / weights.sum(-1, keepdim=True), given.v)


@torch.no_grad()
def test_exponential_is_one_decay_for_each_head() -> None:
    memory, given = ExponentialMemory(16, 2, 8, features="elu", horizon=100), inputs()
    rates = memory.log_rate.exp()
    expected = decayed_average(given, torch.exp(-rates * torch.arange(12)))
    torch.testing.assert_close(memory(given).output, expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_uniform_power_law_is_the_gl_kernel() -> None:
    from vort.fractional import gl_weights

    memory = UniformPowerLawMemory(16, 2, 8, features="elu", horizon=1000, terms=16)
    given = inputs()
    expected = decayed_average(given, gl_weights(0.7, 11).float())
    torch.testing.assert_close(memory(given).output, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["exponential", "mixture", "uniform_power_law"])
def test_rates_and_orders_are_learned_unless_fixed(name: str) -> None:
    memory, given = made(name), inputs()
    memory(given).output.square().sum().backward()
    own = {n: p for n, p in memory.named_parameters() if "." not in n}
    assert own
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in own.values())
    fixed = made(name, learn_rates=False)
    if name != "mixture":
        assert not any(p.requires_grad for n, p in fixed.named_parameters() if "." not in n)


@pytest.mark.parametrize("name", ["mixture", "uniform_power_law"])
def test_gates_are_there_for_rivals_too(name: str) -> None:
    gated, plain = made(name), made(name, write_gate=False, read_weights=False)
    assert gated.route(inputs()).read is not None
    assert plain.route(inputs()).read is None
    assert plain.gates.write is None


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"memory must be one of vort, .*got 'lstm'"):
        build_memory("lstm", SETTINGS)
