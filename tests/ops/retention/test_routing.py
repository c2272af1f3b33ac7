"""Orders become writes: exactly through the basis, straight through the banks."""

import re

import numpy as np
import pytest
import torch

from vort.fractional import PowerLawBasis
from vort.fractional.basis import shipped_bases
from vort.fractional.gl import gl_weights
from vort.ops.retention import paper_banks, retention, shared_basis

BANKS = {"banks": 4, "scales": 24, "horizon": 200, "order_min": 0.2}
ORDERS = [0.4, 0.6, 0.8, 1.0]
BASIS = PowerLawBasis.fit(horizon=1000, terms=8)


def kernel_of(write: torch.Tensor, log_decay: torch.Tensor, lags: int) -> torch.Tensor:
    lag = torch.arange(lags + 1, dtype=write.dtype)
    return (write[..., None, :] * torch.exp(log_decay * lag[:, None])).sum(-1)


def test_a_token_writes_to_the_nearest_bank_alone() -> None:
    order = torch.tensor([[[0.21, 0.69, 0.71, 0.95]]], dtype=torch.float64)
    write, log_decay = paper_banks(order, **BANKS)
    kernel = kernel_of(write, log_decay, 200)[0, 0]
    nearest = torch.tensor([0.4, 0.6, 0.8, 1.0], dtype=torch.float64)
    expected = gl_weights(nearest, 200)
    torch.testing.assert_close(kernel, expected, rtol=0, atol=5e-3)


def test_the_bank_of_order_one_never_forgets() -> None:
    write, log_decay = paper_banks(torch.ones(1, 1, 1), **BANKS)
    assert kernel_of(write, log_decay, 100_000).flatten()[-1] == 1
    assert (log_decay <= 0).all()


@pytest.mark.parametrize("value", [0.1, 0.3, 0.47, 0.65, 0.9, 1.0])
def test_banks_have_the_gradient_of_linear_interpolation(value: float) -> None:
    order = torch.full((1, 1, 1), value, dtype=torch.float64, requires_grad=True)
    write, _ = paper_banks(order, **BANKS)
    probe = torch.randn(write.shape[-1], dtype=torch.float64)
    (found,) = torch.autograd.grad((write * probe).sum(), order)
    right = next((i for i, bank in enumerate(ORDERS) if bank >= value and i > 0), 3)
    sides = []
    for bank in (ORDERS[right - 1], ORDERS[right]):
        at_bank, _ = paper_banks(torch.full((1, 1, 1), bank, dtype=torch.float64), **BANKS)
        sides.append((at_bank * probe).sum())
    slope = (sides[1] - sides[0]) / (ORDERS[right] - ORDERS[right - 1])
    torch.testing.assert_close(found.squeeze(), slope)


def test_one_bank_takes_every_order() -> None:
    write, log_decay = paper_banks(torch.rand(1, 4, 2), banks=1, scales=5, horizon=100)
    assert write.shape == (1, 4, 2, 1)
    assert log_decay.tolist() == [0.0]


@pytest.mark.parametrize("routing", ["banks", "basis"])
def test_orders_learn_through_the_op(routing: str) -> None:
    order = (0.3 + 0.6 * torch.rand(1, 50, 2)).requires_grad_()
    if routing == "banks":
        write, log_decay = paper_banks(order, 4, 6, 100)
    else:
        write, log_decay = shared_basis(order, PowerLawBasis.fit(horizon=1000, terms=8))
    q, k, v = (torch.rand(1, 50, 2, 8) for _ in range(3))
    o, _ = retention(q, k, v, write, log_decay)
    o[:, -1].sum().backward()
    assert order.grad is not None
    assert torch.isfinite(order.grad).all()
    assert order.grad.any()


def test_banks_say_what_they_allow() -> None:
    with pytest.raises(ValueError, match="banks must be a whole number >= 1, got 0"):
        paper_banks(torch.ones(1, 1, 1), 0, 4, 100)
    with pytest.raises(ValueError, match=r"order_min must lie in \(0, 1\), got 1.5"):
        paper_banks(torch.ones(1, 1, 1), 4, 4, 100, order_min=1.5)


@pytest.mark.parametrize("value", [7.0, -3.0, 0.0, float("nan")])
def test_banks_take_orders_alone(value: float) -> None:
    order = torch.tensor([[[0.5, value]]])
    with pytest.raises(ValueError, match=rf"order must lie in \(0, 1\], got {value:g} at index"):
        paper_banks(order, **BANKS)
    paper_banks(order, **BANKS, validate=False)


@pytest.mark.parametrize(
    ("order", "gate"), [((2, 2, 2), (2,)), ((3, 2, 2), (2, 1, 1, 1)), ((3, 2, 2), (3, 2, 1))]
)
def test_a_gate_of_another_shape_than_the_orders_is_refused(
    order: tuple[int, ...], gate: tuple[int, ...]
) -> None:
    message = re.escape(f"gate must have the shape of order {list(order)}, got {list(gate)}")
    with pytest.raises(ValueError, match=message):
        shared_basis(torch.full(order, 0.5), BASIS, torch.ones(gate))


def test_a_gate_scales_what_the_shared_basis_writes_and_orders_are_checked_unless_told() -> None:
    basis = PowerLawBasis.fit(horizon=1000, terms=8)
    order, gate = torch.rand(2, 5, 3) * 0.9 + 0.1, torch.rand(2, 5, 3)
    write, log_decay = shared_basis(order, basis, gate)
    torch.testing.assert_close(write, basis.weights(order) * gate[..., None])
    torch.testing.assert_close(log_decay, basis.log_decay, atol=0, rtol=0)
    log_decay.requires_grad_()
    assert not shared_basis(order, basis)[1].requires_grad
    with pytest.raises(ValueError, match="order must lie in"):
        shared_basis(order + 1, basis)
    shared_basis(order + 1, basis, validate=False)


def test_what_one_model_does_to_the_shared_decays_no_other_sees() -> None:
    basis, order = PowerLawBasis.fit(horizon=1000, terms=8), torch.full((1, 5, 2), 0.7)
    _, log_decay = shared_basis(order, basis)
    expected = log_decay.clone()
    log_decay.mul_(2)
    assert torch.equal(shared_basis(order, basis)[1], expected)


def test_bases_of_the_package_cannot_be_written_to() -> None:
    basis = next(iter(shipped_bases().values()))
    for x in (basis.rates, basis.polynomials):
        with pytest.raises(ValueError, match="read-only"):
            x *= 2
    given = {"horizon": basis.horizon, "terms": basis.terms, "order_min": basis.order_min}
    PowerLawBasis.fit(**given).rates[:] = 0
    assert np.array_equal(PowerLawBasis.fit(**given).rates, basis.rates)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_orders_in_half_precision_do_not_cost_the_kernel_its_shape(dtype: torch.dtype) -> None:
    order = (torch.rand(1, 6, 2) * 0.9 + 0.05).to(dtype)
    for rule in (lambda x: paper_banks(x, **BANKS), lambda x: shared_basis(x, BASIS)):
        for found, expected in zip(rule(order), rule(order.float()), strict=True):
            assert torch.equal(found, expected)
            assert found.dtype == torch.float32


@pytest.mark.parametrize("routing", ["banks", "basis"])
def test_orders_of_single_examples_have_the_gradients_of_each_alone(routing: str) -> None:
    orders = torch.rand(3, 1, 6, 2, dtype=torch.float64) * 0.9 + 0.05

    def loss(order: torch.Tensor) -> torch.Tensor:
        found = paper_banks(order, **BANKS) if routing == "banks" else shared_basis(order, BASIS)
        return found[0].square().sum()

    expected = torch.stack([torch.func.grad(loss)(order) for order in orders])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(orders), expected)
