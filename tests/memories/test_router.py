from typing import Any

import pytest
import torch

from vort.fractional import PowerLawBasis
from vort.memories import Router
from vort.memories.vort import OrderProjection
from vort.models import VortConfig, VortForCausalLM

HIDDEN, HEADS = 12, 3


def router(**options: object) -> Router:
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "horizon": 1000}
    return Router(**{**sizes, "use_entropy": False, **options})


def test_orders_are_eq_routing() -> None:
    made = router(use_entropy=True, use_entity=True, order_min=0.1, num_scales=6)
    x, entropy, entity = torch.randn(2, 5, HIDDEN), torch.rand(2, 5, HEADS), torch.ones(2, 5)
    stacked = torch.cat([x, entropy, entity[..., None]], -1)
    logits = stacked @ made.order.weight.T + made.order.bias
    expected = 0.1 + 0.9 * torch.sigmoid(logits)
    torch.testing.assert_close(made(x, entropy, entity).order, expected)


def test_absent_inputs_count_as_zero() -> None:
    made, x = router(use_entropy=True, use_entity=True), torch.randn(2, 5, HIDDEN)
    zeros = made(x, torch.zeros(2, 5, HEADS), torch.zeros(2, 5))
    torch.testing.assert_close(made(x).order, zeros.order, atol=0, rtol=0)


def test_heads_start_at_spread_orders() -> None:
    order = router()(torch.zeros(1, 1, HIDDEN)).order.flatten()
    assert (order.diff() > 0.1).all()
    assert order[0] < 0.4
    assert order[-1] > 0.9
    alone = OrderProjection(HIDDEN, 1)
    assert torch.sigmoid(alone.bias).item() == pytest.approx(0.7)


def test_heads_can_start_at_one_order() -> None:
    order = router(order_start=0.6, order_min=0.1)(torch.zeros(1, 1, HIDDEN)).order.flatten()
    torch.testing.assert_close(order, torch.full_like(order, 0.1 + 0.9 * 0.6))
    with pytest.raises(ValueError, match="order_start must lie in"):
        router(order_start=1.0)


def test_continuous_routing_writes_the_basis_weights() -> None:
    made = router(write_gate=False, num_scales=8)
    routing = made(torch.randn(2, 5, HIDDEN))
    basis = PowerLawBasis.fit(1000, 8)
    torch.testing.assert_close(routing.write, basis.weights(routing.order))
    torch.testing.assert_close(routing.log_decay, basis.log_decay)


def test_banks_write_the_nearest_fixed_order_alone() -> None:
    from vort.ops.retention import paper_banks

    made = router(routing="banks", num_banks=4, num_scales=5, write_gate=False)
    routing = made(3 * torch.randn(2, 50, HIDDEN))
    write, log_decay = paper_banks(routing.order, 4, 5, 1000)
    torch.testing.assert_close(routing.write, write)
    torch.testing.assert_close(routing.log_decay, log_decay)


@pytest.mark.parametrize("mode", ["continuous", "banks"])
def test_the_order_can_be_learned(mode: str) -> None:
    made = router(routing=mode, num_banks=4, num_scales=5)
    routing = made(torch.randn(2, 5, HIDDEN))
    scales = torch.arange(routing.write.shape[-1], dtype=torch.float32)
    (routing.write * scales).sum().backward()
    assert made.order.weight.grad.abs().sum() > 0


def test_read_weights_are_positive_and_average_one() -> None:
    read = router(num_scales=6)(10 * torch.randn(2, 5, HIDDEN)).read
    assert (read > 0).all()
    torch.testing.assert_close(read.mean(-1), torch.ones(2, 5, HEADS))


def test_a_write_gate_scales_all_scales_alike() -> None:
    gated, x = router(), torch.randn(2, 5, HIDDEN)
    routing = gated(x)
    ratio = routing.write / gated.basis.weights(routing.order)
    torch.testing.assert_close(ratio, ratio[..., :1].expand_as(ratio))
    assert ((ratio > 0) & (ratio < 1)).all()


def test_rates_survive_half_precision() -> None:
    made = router().bfloat16()
    routing = made(torch.randn(1, 4, HIDDEN, dtype=torch.bfloat16))
    assert routing.write.dtype == routing.log_decay.dtype == torch.float32
    exact = PowerLawBasis.fit(1000, 8).log_decay
    torch.testing.assert_close(routing.log_decay, exact, atol=0, rtol=0)


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="routing must be one of continuous, banks, got 'nearest'"):
        router(routing="nearest")
    with pytest.raises(TypeError, match="Router has no setting 'terms'"):
        router(terms=3)


def test_heads_can_start_at_orders_of_their_own() -> None:
    order = router(order_start=[0.2, 0.7, 0.7], order_min=0.1)(torch.zeros(1, 1, HIDDEN)).order
    torch.testing.assert_close(order.flatten(), 0.1 + 0.9 * torch.tensor([0.2, 0.7, 0.7]))
    with pytest.raises(ValueError, match="order_start must be a share for each of 3 heads"):
        router(order_start=[0.2, 0.7])
    with pytest.raises(ValueError, match="order_start must lie in"):
        router(order_start=[0.2, 0.7, 1.2])


def test_heads_begin_to_read_around_scales_of_their_own_unless_told_otherwise() -> None:
    made = router(num_scales=12)
    read = made(torch.zeros(1, 1, HIDDEN)).read[0, 0]
    # From quick to slow, as orders are from low to high; scales are in the order of their rates.
    assert read.argmax(-1).tolist() == [9, 5, 1]
    assert made.order.bias.diff().gt(0).all()
    torch.testing.assert_close(read.mean(-1), torch.ones(HEADS))
    assert read.min() > 1e-3  # nothing is out of reach
    for other in ({"read_start": "even"}, {"routing": "banks", "num_banks": 2}):
        even = router(num_scales=12, **other)(torch.zeros(1, 1, HIDDEN)).read
        torch.testing.assert_close(even, torch.ones_like(even))


def test_where_reading_begins_is_kept_in_a_model_and_drawn_like_other_weights() -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "num_scales": 8}
    models = {}
    for start in ("even", "spread"):
        torch.manual_seed(0)
        models[start] = VortForCausalLM(VortConfig(**sizes, read_start=start))
    even, spread = (models[x].model.memories[0].router.gates.read for x in ("even", "spread"))
    torch.testing.assert_close(spread.weight, even.weight, atol=0, rtol=0)
    assert even.bias.eq(0).all()
    assert spread.bias.view(2, 8).argmax(-1).tolist() == [5, 1]


def test_a_mixture_begins_to_read_apart_where_its_rates_stand_as_vorts_do() -> None:
    for start, spread in (("basis", True), ("even", False)):
        config = VortConfig(hidden_size=16, memory="mixture", rates_start=start)
        assert config.reads_spread == spread
    with pytest.raises(ValueError, match="rates_start='even'"):
        VortConfig(hidden_size=16, memory="mixture", read_start="spread")


@pytest.mark.parametrize("other", [{"routing": "banks"}, {"read_weights": False}])
def test_reading_begins_at_scales_only_where_they_are_weighed_and_in_order(other: Any) -> None:
    with pytest.raises(ValueError, match='read_start="spread" needs read_weights over scales'):
        router(read_start="spread", **other)


def test_with_a_leak_the_slowest_scale_forgets_over_the_horizon_and_no_other_changes() -> None:
    kept, leaking = router(num_scales=6), router(num_scales=6, leak=True)
    x = torch.randn(2, 5, HIDDEN)
    torch.testing.assert_close(leaking(x).write, kept(x).write, atol=0, rtol=0)
    rates = -leaking(x).log_decay
    assert kept(x).log_decay[0] == 0
    torch.testing.assert_close(rates[0], torch.tensor(1e-3))
    torch.testing.assert_close(rates[1:], -kept(x).log_decay[1:])
    leaking.set_horizon(5000)
    torch.testing.assert_close(-leaking(x).log_decay[0], torch.tensor(2e-4))
    assert (-router(num_scales=2, leak=True)(x).log_decay).diff() > 0
    with pytest.raises(ValueError, match='leak needs routing="continuous"'):
        router(leak=True, routing="banks")


def test_learned_rates_start_at_those_of_the_basis() -> None:
    plain, learned = router(num_scales=6), router(num_scales=6, learn_basis=True)
    x = torch.randn(2, 5, HIDDEN)
    expected, found = plain(x), learned(x)
    torch.testing.assert_close(found.write, expected.write, atol=0, rtol=0)
    torch.testing.assert_close(found.log_decay, expected.log_decay.expand(HEADS, 6))


def test_a_longer_horizon_moves_learned_rates_by_what_was_learned() -> None:
    made = router(num_scales=6, learn_basis=True)
    factor = torch.rand(HEADS, 6) + 0.5
    with torch.no_grad():
        made.log_factor.copy_(factor.log())
    made.set_horizon(4096)
    rates = torch.from_numpy(PowerLawBasis.fit(4096, 6).rates).float()
    torch.testing.assert_close(-made.log_decay(torch.device("cpu")), rates * factor)


def test_banks_have_no_rates_to_learn() -> None:
    with pytest.raises(ValueError, match='learn_basis needs routing="continuous"'):
        router(routing="banks", learn_basis=True)
