from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.memories.cases import NAMES, inputs, made
from vort.memories import MEMORIES, LayerSettings, MemoryInputs
from vort.ops.feature_maps import elu_features

PLAIN = {"write_gate": False, "read_weights": False}


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("name", NAMES)
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


@pytest.mark.parametrize("name", NAMES)
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
    growing = [name for name in NAMES if made(name).state_size(10) != made(name).state_size(20)]
    assert growing == ["softmax"]
    assert made("softmax", softmax_cache_size=4).state_size(20) == 2 * 4 * 2 * 8


@torch.no_grad()
def test_softmax_is_causal_attention_with_and_without_a_cache() -> None:
    memory, given = made("softmax", rope_theta=None), inputs()
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
    memory, given = made("exponential", feature_map="elu", horizon=100, write_gate=False), inputs()
    rates = memory.log_rate.exp()
    expected = decayed_average(given, torch.exp(-rates * torch.arange(12)))
    torch.testing.assert_close(memory(given).output, expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_uniform_power_law_is_the_gl_kernel() -> None:
    from vort.fractional import gl_weights

    memory = made("uniform_power_law", feature_map="elu", num_scales=16, **PLAIN)
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
    gated, plain = made(name), made(name, **PLAIN)
    assert gated.route(inputs()).read is not None
    assert plain.route(inputs()).read is None
    assert plain.gates.write is None


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"memory must be one of vort, .*got 'lstm'"):
        LayerSettings(memory="lstm")


def test_unknown_settings_are_an_error_that_helps() -> None:
    with pytest.raises(TypeError, match="VortMemory has no setting 'num_scale'; did you mean num_"):
        made("vort", num_scale=3)
    with pytest.raises(ValueError, match="settings are given, so these have no use: horizon"):
        type(made("vort"))(LayerSettings(), horizon=3)


def test_only_the_exact_power_law_keeps_no_state() -> None:
    memory = made("exact_power_law", **PLAIN)
    assert not memory.keeps_state
    with pytest.raises(ValueError, match="keeps no state"):
        memory(inputs(), output_state=True)
    with pytest.raises(ValueError, match="read_weights must be off"):
        made("exact_power_law")


class Calls(TorchDispatchMode):
    """The names of all ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(op))
        return op(*args, **(kwargs or {}))


# What calls `retention` has kernels of its own on a GPU, and looks at numbers on a CPU.
STEADY = [n for n in NAMES if MEMORIES[n].records_steps and not MEMORIES[n].is_retention]


@pytest.mark.parametrize("name", STEADY)
@torch.no_grad()
def test_a_step_that_is_recorded_is_the_same_every_time_and_asks_for_no_number(name: str) -> None:
    memory, given = made(name), inputs(5)
    state, seen = memory(given.at(0), output_state=True).state, []
    for position in (1, 2, 3):
        with Calls() as calls:
            state = memory.step(given.at(position), state).state
        seen.append(calls.names)
    assert seen[0] == seen[1] == seen[2]
    assert not [x for x in seen[0] if "_local_scalar_dense" in x or "nonzero" in x]


def test_memories_that_are_recorded_keep_states_of_one_size() -> None:
    recorded = {name for name in NAMES if MEMORIES[name].records_steps}
    assert recorded >= {"vort", "exponential", "mixture", "gla", "gla_scales", "mamba2", "none"}
    assert "softmax" not in recorded
    for name in recorded:
        assert made(name).state_size(1000) == made(name).state_size(0)


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in NAMES), ("softmax", {"softmax_heavy_hitters": 4})],
)
def test_no_tokens_leave_a_state_to_go_on_from(name: str, options: dict[str, Any]) -> None:
    memory, given, none = made(name, **options).eval(), inputs(6), inputs(0)
    whole = memory(given).output
    state = memory(none, output_state=True).state
    found = memory(given, state, output_state=True)
    torch.testing.assert_close(found.output, whole, rtol=1e-5, atol=1e-5)
    after = memory(none, found.state, output_state=True)
    assert after.output.shape == (2, 0, 2, 8)
    for key, x in found.state.items():
        torch.testing.assert_close(after.state[key], x)
