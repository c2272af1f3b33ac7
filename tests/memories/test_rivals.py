"""Each memory against its definition in a few lines of float64, written down a second time here.

Nothing below calls what a memory is made of: rates, gates and gains are computed from parameters by
the formulas that the docstrings state, and retrieval is a loop over all pairs or all steps.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.memories.cases import inputs, made
from vort.fractional import PowerLawBasis
from vort.layers import VortAttention
from vort.memories import MEMORIES, Memory, MemoryInputs

LENGTH, HEADS, SIZE = 12, 2, 8
PLAIN = {"write_gate": False, "read_weights": False}


def stirred(name: str, **changes: Any) -> Memory:
    """A memory in float64 whose parameters all differ from their start, so that each one shows."""
    memory = made(name, feature_map="elu", **changes).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for x in memory.parameters():
            x.add_(0.7 * torch.randn(x.shape, generator=generator, dtype=torch.float64))
    return memory


def doubled() -> MemoryInputs:
    given = inputs(LENGTH)
    return MemoryInputs(*(x.double() for x in (given.hidden_states, given.q, given.k, given.v)))


def elu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, x.exp())


def linear(x: Tensor, projection: Any) -> Tensor:
    return x @ projection.weight.T + projection.bias


def write_gate(memory: Any, x: Tensor) -> Tensor:
    """`[B, T, H]` in (0, 1)."""
    gates = getattr(memory, "router", memory).gates
    return 1 / (1 + (-linear(x, gates.write)).exp())


def read_weights(memory: Any, x: Tensor, scales: int) -> Tensor:
    """`[B, T, H, S]`, averaging 1."""
    gates = getattr(memory, "router", memory).gates
    weights = linear(x, gates.read).unflatten(-1, (HEADS, scales)).exp()
    return scales * weights / weights.sum(-1, keepdim=True)


def retrieved(
    given: MemoryInputs, write: Tensor, read: Tensor, rates: Tensor, *, include_self: bool = True
) -> Tensor:
    """Σ_i Σ_s read_ts e^{-rate_s (t-i)} write_is (φ(q_t)·φ(k_i)) v_i over the same with v = 1.

    write, read `[B, T, H, S]`, rates `[H, S]`.
    """
    output = torch.zeros_like(given.v)
    for row in range(len(given.q)):
        for head in range(HEADS):
            for t in range(LENGTH):
                above, below = torch.zeros(SIZE, dtype=torch.float64), 0.0
                for i in range(t + include_self):
                    kept = (-rates[head] * (t - i)).exp()
                    weight = (read[row, t, head] * kept * write[row, i, head]).sum()
                    weight *= elu(given.q[row, t, head]) @ elu(given.k[row, i, head])
                    above += weight * given.v[row, i, head]
                    below += weight
                # With nothing to read yet there is nothing to find.
                output[row, t, head] = above / below if t + include_self else above
    return output


@torch.no_grad()
def test_exponential_forgets_at_the_rate_it_is_given_and_writes_its_gate() -> None:
    memory, given = stirred("exponential", exponential_rate=0.05), doubled()
    rates = memory.log_rate.exp()
    gate = write_gate(memory, given.hidden_states)[..., None]
    expected = retrieved(given, gate, torch.ones_like(gate), rates)
    torch.testing.assert_close(memory(given).output, expected)
    fixed = made(
        "exponential", feature_map="elu", exponential_rate=0.05, learn_rates=False, **PLAIN
    ).double()
    ones = torch.ones_like(gate)
    expected = retrieved(given, ones, ones, torch.full((HEADS, 1), 0.05, dtype=torch.float64))
    torch.testing.assert_close(fixed(given).output, expected, rtol=1e-6, atol=1e-6)


def test_rates_of_an_exponential_start_spread_up_to_the_horizon() -> None:
    three = MEMORIES["exponential"](hidden_size=12, num_attention_heads=3, horizon=400)
    wanted = torch.tensor([4.0, 40.0, 400.0])
    torch.testing.assert_close(1 / three.log_rate.exp().flatten(), wanted)
    alone = MEMORIES["exponential"](hidden_size=12, num_attention_heads=1, horizon=400)
    assert 1 / alone.log_rate.exp().item() == pytest.approx(40.0)


@torch.no_grad()
def test_without_decay_all_that_was_written_stays() -> None:
    memory, given = stirred("linear"), doubled()
    gate = write_gate(memory, given.hidden_states)[..., None]
    expected = retrieved(given, gate, torch.ones_like(gate), torch.zeros(HEADS, 1))
    torch.testing.assert_close(memory(given).output, expected)


@pytest.mark.parametrize("gain", ["none", "token", "scale"])
@torch.no_grad()
def test_a_mixture_is_a_sum_of_exponentials_with_gates_and_gain(gain: str) -> None:
    memory, given = stirred("mixture", num_scales=5, write_gain=gain), doubled()
    x = given.hidden_states
    write = memory.log_weight.exp() * write_gate(memory, x)[..., None]
    if gain != "none":
        write = write * linear(x, memory.gate_gain).unflatten(-1, (HEADS, -1)).exp()
    expected = retrieved(given, write, read_weights(memory, x, 5), memory.log_rate.exp())
    torch.testing.assert_close(memory(given).output, expected)


def test_a_gain_has_no_bound_that_a_gate_has_and_starts_at_one() -> None:
    memory, given = made("mixture", write_gain="token", write_gate=False), inputs()
    torch.testing.assert_close(
        memory.route(given).write, torch.ones(2, 12, 2, 8), rtol=0.3, atol=0.3
    )
    with torch.no_grad():
        memory.gate_gain.bias.fill_(3.0)
    assert memory.route(given).write.min() > 10
    assert made("mixture").gate_gain is None


def test_rates_of_a_mixture_start_evenly_from_one_to_the_horizon_or_at_those_of_vort() -> None:
    even = 1 / made("mixture", num_scales=4, horizon=1000).log_rate.exp()
    wanted = torch.tensor([1.0, 10.0, 100.0, 1000.0])
    torch.testing.assert_close(even, wanted.expand(2, 4), rtol=1e-4, atol=0)
    found = made("mixture", num_scales=8, horizon=1000, rates_start="basis").log_rate.exp()
    basis = torch.tensor(PowerLawBasis.fit(1000, 8).rates).float()
    assert basis[0] == 0
    torch.testing.assert_close(found[:, 1:], basis[1:].expand(2, 7), rtol=1e-5, atol=0)
    # The slowest forgets next to nothing within the horizon.
    assert (found[:, 0] * 1000 < 0.02).all()


@torch.no_grad()
def test_one_order_for_each_head_is_its_kernel() -> None:
    memory = stirred("uniform_power_law", order_per_head=True, num_scales=6)
    given, basis = doubled(), PowerLawBasis.fit(1000, 6)
    order = 0.05 + 0.95 / (1 + (-memory.order_logit).exp())
    assert order[0] != order[1]
    weights = torch.stack([basis.weights(a) for a in order])
    write = weights * write_gate(memory, given.hidden_states)[..., None]
    read = read_weights(memory, given.hidden_states, 6)
    rates = torch.from_numpy(basis.rates).expand(HEADS, 6)
    expected = retrieved(given, write, read, rates)
    # Decays are kept in float32.
    torch.testing.assert_close(memory(given).output, expected, rtol=1e-5, atol=1e-5)


def test_orders_of_heads_start_where_those_of_vort_do() -> None:
    wide = {"hidden_size": 24, "num_attention_heads": 3, "horizon": 1000}
    for start in (None, 0.6):
        memory = MEMORIES["uniform_power_law"](**wide, order_per_head=True, order_start=start)
        router = MEMORIES["vort"](**wide, order_start=start, use_entropy=False).router
        torch.testing.assert_close(memory.order(), router.orders(torch.zeros(1, 1, 24)).flatten())
    with pytest.raises(ValueError, match="order_per_head must be off"):
        made("exact_power_law", order_per_head=True, **PLAIN)


@pytest.mark.parametrize("include_self", [True, False])
@torch.no_grad()
def test_the_exact_power_law_is_its_weights_one_by_one(include_self: bool) -> None:
    options = {"read_weights": False, "include_self": include_self}
    memory, given = stirred("exact_power_law", **options), doubled()
    order = 0.05 + 0.95 / (1 + math.exp(-memory.order_logit.item()))
    weights = [1.0]
    for lag in range(1, LENGTH):
        weights.append(weights[-1] * (lag - 1 + order) / lag)
    gate = write_gate(memory, given.hidden_states)
    similarity = torch.einsum("bthd,bihd->bhti", elu(given.q), elu(given.k))
    for t in range(1, LENGTH):
        last = t + include_self
        kernel = torch.tensor([weights[t - i] for i in range(last)], dtype=torch.float64)
        found = similarity[:, :, t, :last] * gate.mT[:, :, :last] * kernel
        share = found / found.sum(-1, keepdim=True)
        expected = torch.einsum("bhi,bihv->bhv", share, given.v[:, :last])
        torch.testing.assert_close(memory(given).output[:, t], expected)


@pytest.mark.parametrize("include_self", [True, False])
@torch.no_grad()
def test_vort_writes_by_order_and_gate_reads_by_weight_and_obeys_include_self(
    include_self: bool,
) -> None:
    options = {"num_scales": 6, "use_entropy": False, "include_self": include_self}
    memory, given = stirred("vort", **options), doubled()
    x, basis = given.hidden_states, PowerLawBasis.fit(1000, 6)
    order = 0.05 + 0.95 / (1 + (-linear(x, memory.router.order)).exp())
    write = basis.weights(order) * write_gate(memory, x)[..., None]
    read = read_weights(memory, x, 6)
    rates = torch.from_numpy(basis.rates).expand(HEADS, 6)
    expected = retrieved(given, write, read, rates, include_self=include_self)
    torch.testing.assert_close(memory(given).output, expected, rtol=1e-5, atol=1e-5)
    state, steps = None, []
    for t in range(LENGTH):
        found = memory.step(given.at(t), state)
        state = found.state
        steps.append(found.output)
    torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("name", ["vort", "mixture"])
@torch.no_grad()
def test_a_layer_hands_the_memory_what_it_needs_and_changes_nothing(
    name: str, include_self: bool
) -> None:
    torch.manual_seed(0)
    bare = dict.fromkeys(("qk_norm", "output_norm", "output_gate"), False)
    bare |= {"sliding_window": 0, "conv_size": 0}
    layer = VortAttention(
        hidden_size=16, num_attention_heads=2, horizon=1000, memory=name, feature_map="elu",
        num_scales=6, use_entropy=False, include_self=include_self, **bare,
    ).double()  # fmt: skip
    for x in layer.memory.parameters():
        x.add_(0.7 * torch.randn_like(x))
    x = torch.randn(2, LENGTH, 16, dtype=torch.float64)
    heads = [(x @ p.weight.T).unflatten(-1, (HEADS, SIZE)) for p in _projections(layer)]
    given = MemoryInputs(x, *heads)
    write = write_gate(layer.memory, x)[..., None]
    if name == "vort":
        basis = PowerLawBasis.fit(1000, 6)
        order = 0.05 + 0.95 / (1 + (-linear(x, layer.memory.router.order)).exp())
        write, rates = write * basis.weights(order), torch.from_numpy(basis.rates).expand(HEADS, 6)
    else:
        write, rates = write * layer.memory.log_weight.exp(), layer.memory.log_rate.exp()
    read = read_weights(layer.memory, x, 6)
    found = retrieved(given, write, read, rates, include_self=include_self)
    expected = found.flatten(2) @ layer.o_proj.weight.T
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-5, atol=1e-5)


def _projections(layer: VortAttention) -> tuple[Any, ...]:
    return layer.q_proj, layer.k_proj, layer.v_proj


@torch.no_grad()
def test_gla_forgets_by_the_sixteenth_root_of_a_sigmoid() -> None:
    memory, given = stirred("gla"), doubled()
    low = given.hidden_states @ memory.gate_in.weight.T
    kept = (1 / (1 + (-linear(low, memory.gate_out)).exp())) ** (1 / 16)
    kept = kept.unflatten(-1, (HEADS, SIZE))
    assert kept.min() < 0.6
    state = torch.zeros(2, HEADS, SIZE, SIZE, dtype=torch.float64)
    for t in range(LENGTH):
        state = kept[:, t, :, :, None] * state
        state = state + given.k[:, t, :, :, None] * given.v[:, t, :, None, :]
        expected = (given.q[:, t, :, :, None] * state).sum(-2) / SIZE**0.5
        torch.testing.assert_close(memory(given).output[:, t], expected)


@pytest.mark.parametrize("normalizer", ["decayed", "none"])
@torch.no_grad()
def test_gla_at_the_state_of_vort_is_so_for_every_scale(normalizer: str) -> None:
    scales = 3
    memory = stirred("gla_scales", num_scales=scales, normalizer=normalizer)
    given = doubled()
    x = given.hidden_states
    logits = linear(x @ memory.gate_in.weight.T, memory.gate_out)
    kept = (1 / (1 + (-logits).exp())) ** (1 / 16)
    kept = kept.unflatten(-1, (HEADS, scales, SIZE))
    gate, read = write_gate(memory, x), read_weights(memory, x, scales)
    ones = torch.ones(2, LENGTH, HEADS, 1, dtype=torch.float64)
    values = torch.cat([given.v, ones], -1)
    state = torch.zeros(2, HEADS, scales, SIZE, SIZE + 1, dtype=torch.float64)
    for t in range(LENGTH):
        key = elu(given.k[:, t]) * gate[:, t, :, None]
        state = kept[:, t, ..., None] * state
        state = state + (key[..., None] * values[:, t, :, None, :])[:, :, None]
        query = read[:, t, :, :, None] * elu(given.q[:, t])[:, :, None]
        found = (query[..., None] * state).sum((2, 3))
        expected = found[..., :-1] / (found[..., -1:] if normalizer == "decayed" else 1)
        torch.testing.assert_close(memory(given).output[:, t], expected)
    assert memory.state_size() == HEADS * scales * SIZE * (SIZE + (normalizer == "decayed"))


def test_gates_of_gla_at_the_state_of_vort_start_at_time_scales_up_to_the_horizon() -> None:
    memory = made("gla_scales", num_scales=4, horizon=1000)
    kept = (1 / (1 + (-memory.gate_out.bias.double()).exp())) ** (1 / 16)
    times = -1 / kept.log().view(HEADS, 4, SIZE)
    wanted = torch.tensor([1.0, 10.0, 100.0, 1000.0], dtype=torch.float64)
    torch.testing.assert_close(times, wanted[:, None].expand(HEADS, 4, SIZE), rtol=1e-3, atol=0)


def test_what_gla_at_the_state_of_vort_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match='include_self must be on for memory="gla_scales"'):
        made("gla_scales", include_self=False)
    with pytest.raises(ValueError, match='normalizer must be "decayed" or "none"'):
        made("gla_scales", normalizer="undecayed")
    with pytest.raises(ValueError, match="write_gain must be one of none, token, scale"):
        made("mixture", write_gain="all")


@torch.no_grad()
def test_a_normaliser_below_zero_turns_no_output_of_gla_over() -> None:
    given = doubled()
    sums, found = (
        made("gla_scales", num_scales=3, feature_map="identity", normalizer=normalizer)
        .double()(given)
        .output
        for normalizer in ("none", "decayed")
    )
    # Divided by a positive number, all keep their signs.
    assert torch.equal(sums.sign(), found.sign())


@torch.no_grad()
def test_the_exact_power_law_divides_by_the_memorys_eps() -> None:
    memory = made("exact_power_law", feature_map="identity", **PLAIN).double()
    given = inputs(1)
    q, k, v = (torch.full((1, 1, 2, 8), x, dtype=torch.float64) for x in (1e-4, 1e-4, 1.0))
    hidden = given.hidden_states[:1].double()
    found = memory(MemoryInputs(hidden, q, k, v)).output
    total = 8 * 1e-4**2
    assert memory.eps == 1e-6
    torch.testing.assert_close(found, torch.full_like(v, total / (total + memory.eps)))
