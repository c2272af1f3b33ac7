"""`vort::hedgehog_fused`, `vort::favor_fused` and their backwards: kernels as PyTorch operators.

Custom operators with fake kernels, so that `torch.compile(fullgraph=True)` sees through them.
Calls that nothing traces go through autograd functions instead, which cost the host far less than
an operator does.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vort.ops.custom import traced

from . import launch

__all__ = ["favor_fused", "hedgehog_fused"]


def _hedgehog(x: Tensor, weight: Tensor) -> Tensor:
    with torch.cuda.device_of(x):  # the GPU that holds the data, whichever is current
        return launch.hedgehog_forward(x.contiguous(), weight.contiguous())


def _hedgehog_gradients(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    with torch.cuda.device_of(x):
        return launch.hedgehog_backward(grad.contiguous(), x.contiguous(), weight.contiguous())


@torch.library.custom_op("vort::hedgehog_fused", mutates_args=())
def hedgehog_op(x: Tensor, weight: Tensor) -> Tensor:
    """What `hedgehog_fused` returns, as an operator."""
    return _hedgehog(x, weight)


@hedgehog_op.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], 2 * weight.shape[-1])


@torch.library.custom_op("vort::hedgehog_fused_backward", mutates_args=())
def hedgehog_backward_op(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients to x and weight."""
    return _hedgehog_gradients(grad, x, weight)


@hedgehog_backward_op.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save_hedgehog(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_hedgehog(ctx: Any, grad: Tensor) -> Any:
    return hedgehog_backward_op(grad, *ctx.saved_tensors)


hedgehog_op.register_autograd(_differentiate_hedgehog, setup_context=_save_hedgehog)


class _Hedgehog(torch.autograd.Function):
    """The same as the operator, without a dispatcher in between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _hedgehog(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _hedgehog_gradients(grad, *ctx.saved_tensors)


def _favor(
    x: Tensor, projection: Tensor, max_norm: float | None, shift: bool, ceiling: float
) -> Tensor:
    with torch.cuda.device_of(x):
        return launch.favor_forward(
            x.contiguous(), projection.contiguous(), max_norm, shift, ceiling
        )


def _favor_gradient(
    grad: Tensor,
    x: Tensor,
    projection: Tensor,
    max_norm: float | None,
    shift: bool,
    ceiling: float,
) -> Tensor:
    with torch.cuda.device_of(x):
        return launch.favor_backward(
            grad.contiguous(), x.contiguous(), projection.contiguous(), max_norm, shift, ceiling
        )


@torch.library.custom_op("vort::favor_fused", mutates_args=())
def favor_op(
    x: Tensor, projection: Tensor, max_norm: float | None, shift: bool, ceiling: float
) -> Tensor:
    """What `favor_fused` returns, as an operator."""
    return _favor(x, projection, max_norm, shift, ceiling)


@favor_op.register_fake
def _(x: Tensor, projection: Tensor, max_norm: float | None, shift: bool, ceiling: float) -> Tensor:
    return x.new_empty(*x.shape[:-1], projection.shape[0])


@torch.library.custom_op("vort::favor_fused_backward", mutates_args=())
def favor_backward_op(
    grad: Tensor,
    x: Tensor,
    projection: Tensor,
    max_norm: float | None,
    shift: bool,
    ceiling: float,
) -> Tensor:
    """Gradient to x."""
    return _favor_gradient(grad, x, projection, max_norm, shift, ceiling)


@favor_backward_op.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    projection: Tensor,
    max_norm: float | None,
    shift: bool,
    ceiling: float,
) -> Tensor:
    return x.new_empty(x.shape)


def _save_favor(ctx: Any, inputs: tuple[Any, ...], output: Tensor | None) -> None:
    x, projection, *ctx.numbers = inputs
    ctx.save_for_backward(x, projection)


def _differentiate_favor(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return favor_backward_op(grad, *ctx.saved_tensors, *ctx.numbers), None, None, None, None


favor_op.register_autograd(_differentiate_favor, setup_context=_save_favor)


class _Favor(torch.autograd.Function):
    """The same as the operator, without a dispatcher in between."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _save_favor(ctx, inputs, None)
        return _favor(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        dx = _favor_gradient(grad, *ctx.saved_tensors, *ctx.numbers)
        return dx, None, None, None, None


def hedgehog_fused(x: Tensor, weight: Tensor) -> Tensor:
    """Return what `hedgehog_features` returns, from fused GPU kernels, forward and backward.

    x is bfloat16 or float32, `[..., d]` with weight `[d, m]` or `[..., H, d]` with weight
    `[H, d, m]`; d and m at most 256. Sums are float32, and so is the weight gradient until it is
    rounded to the weight's dtype.
    """
    if traced(x):
        features: Tensor = hedgehog_op(x, weight)
        return features
    features = _Hedgehog.apply(x, weight)  # type: ignore[no-untyped-call]
    return features


def favor_fused(
    x: Tensor, projection: Tensor, *, max_norm: float | None, shift: bool, ceiling: float
) -> Tensor:
    """Return what `favor_features` returns, from fused GPU kernels, forward and backward.

    x is bfloat16 or float32, `[..., d]`, projection `[m, d]`; d and m at most 256. Exponents stop
    at `ceiling`. The gradient goes to x alone.
    """
    inputs = (x, projection, max_norm, shift, ceiling)
    if traced(x):
        features: Tensor = favor_op(*inputs)
        return features
    features = _Favor.apply(*inputs)  # type: ignore[no-untyped-call]
    return features
