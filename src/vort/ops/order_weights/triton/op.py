"""`vort::order_weights_fused` and its backward: the kernels as PyTorch operators.

Calls that nothing traces go through an autograd function instead, which costs the host far less
than an operator does.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vort.ops.custom import traced
from vort.ops.gpu.launcher import Tile, launch, power_of_two

from .kernels import backward_kernel, forward_kernel

__all__ = ["order_weights_fused"]

WHOLE = Tile(columns=0, warps=4, stages=1)
TILE = 2048  # numbers that a program computes


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _blocks(polynomials: Tensor, order: Tensor) -> tuple[int, dict[str, int]]:
    """How many blocks of orders there are, and the sizes that make one."""
    terms, coefficients = polynomials.shape
    wide = power_of_two(terms, 1)
    # a tile of few terms is no taller than one of four: orders are loaded one to a thread
    height = TILE // max(wide, 4)
    sizes = {"S": terms, "N": coefficients, "BS": wide, "BR": height}
    return -(-order.numel() // height), sizes


def _forward(polynomials: Tensor, order: Tensor, gate: Tensor | None) -> Tensor:
    weights = order.new_empty(*order.shape, polynomials.shape[0])
    count, sizes = _blocks(polynomials, order)
    with torch.cuda.device_of(order):  # the GPU that holds the data, whichever is current
        launch(
            forward_kernel, count,
            polynomials.contiguous(), order.contiguous(), _dense(gate), weights, order.numel(),
            HAS_GATE=gate is not None, tile=WHOLE, **sizes,
        )  # fmt: skip
    return weights


def _gradients(
    grad: Tensor, polynomials: Tensor, order: Tensor, gate: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    d_order = order.new_empty(order.shape)
    d_gate = None if gate is None else gate.new_empty(gate.shape)
    count, sizes = _blocks(polynomials, order)
    with torch.cuda.device_of(order):
        launch(
            backward_kernel, count,
            polynomials.contiguous(), grad.contiguous(), order.contiguous(), _dense(gate),
            d_order, d_gate, order.numel(), HAS_GATE=gate is not None, tile=WHOLE, **sizes,
        )  # fmt: skip
    return d_order, d_gate


@torch.library.custom_op("vort::order_weights_fused", mutates_args=())
def order_weights_op(polynomials: Tensor, order: Tensor, gate: Tensor | None) -> Tensor:
    """What `order_weights_fused` returns, as an operator."""
    return _forward(polynomials, order, gate)


@order_weights_op.register_fake
def _(polynomials: Tensor, order: Tensor, gate: Tensor | None) -> Tensor:
    return order.new_empty(*order.shape, polynomials.shape[0])


@torch.library.custom_op("vort::order_weights_fused_backward", mutates_args=())
def order_weights_backward_op(
    grad: Tensor, polynomials: Tensor, order: Tensor, gate: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients to order and gate; an operator returns no None, so an absent one is empty."""
    d_order, d_gate = _gradients(grad, polynomials, order, gate)
    return d_order, d_order.new_empty(0) if d_gate is None else d_gate


@order_weights_backward_op.register_fake
def _(
    grad: Tensor, polynomials: Tensor, order: Tensor, gate: Tensor | None
) -> tuple[Tensor, Tensor]:
    d_order = order.new_empty(order.shape)
    return d_order, d_order.new_empty(0) if gate is None else gate.new_empty(gate.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor | None]:
    polynomials, order, gate = ctx.saved_tensors
    d_order, d_gate = order_weights_backward_op(grad, polynomials, order, gate)
    return None, d_order, None if gate is None else d_gate


order_weights_op.register_autograd(_differentiate, setup_context=_save)


class _OrderWeights(torch.autograd.Function):
    """The same as the operator, without a dispatcher in between."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        weights = _forward(*inputs)
        _save(ctx, inputs, weights)
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, *_gradients(grad, *ctx.saved_tensors)


def order_weights_fused(polynomials: Tensor, order: Tensor, gate: Tensor | None) -> Tensor:
    """Return `[..., S]` as `order_weights` does, from GPU kernels, forward and backward.

    polynomials `[S, degree + 1]` of the basis, order and gate `[...]`, all float32. The gradient
    goes to order and gate.
    """
    inputs = (polynomials, order, gate)
    if not traced(order):
        return _OrderWeights.apply(*inputs)  # type: ignore[no-any-return, no-untyped-call]
    return order_weights_op(*inputs)  # type: ignore[no-any-return]
