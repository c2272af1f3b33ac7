"""Claims about the kernels, each checked by Triton's interpreter (see `interpreter.py`)."""

import torch

from tests.ops.interpreter import check_claim, kernels_everywhere
from tests.ops.order_weights.cases import (
    INTERPRETER_CASES,
    OrderCase,
    compiled_difference,
    make_basis,
    make_inputs,
    relative_errors,
)
from vort.ops.order_weights.triton import order_weights_fused

BOUND = 2e-6


def equals_exact() -> None:
    for seed, case in enumerate(INTERPRETER_CASES):
        errors = relative_errors(case, torch.float32, "cpu", seed)
        assert all(error <= BOUND for error in errors.values()), (case.name, errors)


def every_number_is_as_exact_as_float32_allows() -> None:
    """No order is worse than others: not where the sine vanishes, nor where sinc divides by 0."""
    basis = make_basis(12, 3)
    orders = torch.cat([torch.linspace(0.05, 1, 2001), 1 - torch.logspace(-7, -1, 500)])
    leaves = [orders.clone().requires_grad_(), orders.double().requires_grad_()]
    got = order_weights_fused(basis.polynomials_on(orders.device, orders.dtype), leaves[0], None)
    truth = basis.weights(leaves[1], validate=False)
    torch.testing.assert_close(got, truth.float(), rtol=1e-5, atol=0)
    grad = torch.randn(12)
    (slope,) = torch.autograd.grad(got @ grad, leaves[0], torch.ones_like(orders))
    (wanted,) = torch.autograd.grad(truth @ grad.double(), leaves[1], torch.ones_like(leaves[1]))
    torch.testing.assert_close(slope, wanted.float(), rtol=1e-5, atol=1e-5)


def keeps_types_under_autocast() -> None:
    plain = relative_errors(OrderCase(), torch.float32, "cpu", 0)
    with torch.autocast("cpu", torch.bfloat16):
        assert relative_errors(OrderCase(), torch.float32, "cpu", 0) == plain


def trains_after_inference_mode() -> None:
    basis = make_basis(5, 3)
    order = torch.rand(3, requires_grad=True)
    with torch.inference_mode():
        polynomials = basis.polynomials_on(order.device, order.dtype)
        order_weights_fused(polynomials, order, None)
    order_weights_fused(
        basis.polynomials_on(order.device, order.dtype), order, None
    ).sum().backward()


def compiles_into_one_graph() -> None:
    assert compiled_difference("cpu") <= BOUND


def obeys_torch_library() -> None:
    operator = torch.ops.vort.order_weights_fused.default
    inputs = make_inputs(OrderCase(shape=(2, 5)), "cpu", 0)
    order, gate = (inputs[name].requires_grad_() for name in ("order", "gate"))
    polynomials = make_basis(12, 3).polynomials_on(order.device, order.dtype)
    torch.library.opcheck(operator, (polynomials, order, gate))
    torch.library.opcheck(operator, (polynomials, order, None))


def a_router_of_any_kind_routes_as_without_kernels() -> None:
    from vort.memories import Router

    x = torch.randn(2, 5, 16)
    for gain in ("none", "token", "scale"):
        for gates in (True, False):
            router = Router(
                hidden_size=16, num_attention_heads=2, horizon=1000, use_entropy=False,
                write_gain=gain, write_gate=gates, read_weights=gates,
            )  # fmt: skip
            found = []
            for kernels in (True, False):
                with kernels_everywhere(kernels):
                    assert (router.along(x) is not None) == kernels
                    routing = router(x)
                grads = torch.autograd.grad(routing.write.square().sum(), router.parameters(),
                                            allow_unused=True, materialize_grads=True)  # fmt: skip
                found.append([routing.write, routing.order, *grads])
            for one, other in zip(*found, strict=True):
                assert (one - other).norm() <= 1e-5 * other.norm(), (gain, gates)


if __name__ == "__main__":
    check_claim()
