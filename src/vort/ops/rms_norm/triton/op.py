"""`vort::rms_norm_fused` and its backward: the kernels as PyTorch operators.

Calls that nothing traces go through an autograd function instead, which costs the host far less
than an operator does.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vort.ops.gpu.launcher import Shape, launch, power_of_two, traced

from .kernels import backward_kernel, forward_kernel

__all__ = ["rms_norm_fused"]

WHOLE = Shape(columns=0, warps=4, stages=1)
# Numbers in a tile. The backward holds three tiles at once, the forward one.
FORWARD_TILE, BACKWARD_TILE = 4096, 2048
# Enough to fill a GPU, few enough that their partial sums are short work. The same on every GPU,
# so that sums are taken in the same order.
PROGRAMS = 1024


def _in_groups(x: Tensor) -> tuple[Tensor, int, int]:
    """x, copied if it must be, as groups of dense rows: rows in a group, a group's stride."""
    dim = x.shape[-1]
    if x.is_contiguous() or x.ndim < 3:
        return x.contiguous(), 1, dim
    strides, shape = x.stride(), x.shape
    regular = all(strides[i] == strides[i + 1] * shape[i + 1] for i in range(x.ndim - 3))
    if regular and strides[-1] == 1 and strides[-2] == dim:
        return x, shape[-2], strides[-3]
    return x.contiguous(), 1, dim


def _blocks(x: Tensor, tile: int) -> tuple[int, dict[str, int]]:
    """How many blocks of rows there are, and the sizes that make one."""
    wide = power_of_two(x.shape[-1])
    height = max(1, tile // wide)
    count = -(-(x.numel() // x.shape[-1]) // height)
    return count, {"D": x.shape[-1], "BD": wide, "BR": height}


def _forward(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    x, group, stride = _in_groups(x)
    y = x.new_empty(x.shape)
    count, sizes = _blocks(x, FORWARD_TILE)
    with torch.cuda.device_of(x):  # the GPU that holds the data, whichever is current
        launch(
            forward_kernel, count,
            x, None if weight is None else weight.contiguous(), y, x.numel() // x.shape[-1], eps,
            GROUP=group, STRIDE=stride, HAS_WEIGHT=weight is not None, shape=WHOLE, **sizes,
        )  # fmt: skip
    return y


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    x, group, stride = _in_groups(x)
    dx = x.new_empty(x.shape)
    count, sizes = _blocks(x, BACKWARD_TILE)
    programs, partial = min(count, PROGRAMS), None
    if weight is not None:
        partial = x.new_empty(programs, x.shape[-1], dtype=torch.float32)
    with torch.cuda.device_of(x):
        launch(
            backward_kernel, programs,
            grad.contiguous(), x, None if weight is None else weight.contiguous(), dx, partial,
            x.numel() // x.shape[-1], eps,
            GROUP=group, STRIDE=stride, HAS_WEIGHT=weight is not None, shape=WHOLE, **sizes,
        )  # fmt: skip
    if weight is None or partial is None:
        return dx, None
    return dx, partial.sum(0).to(weight.dtype)


@torch.library.custom_op("vort::rms_norm_fused", mutates_args=())
def rms_norm_op(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """What `rms_norm_fused` returns, as an operator."""
    return _forward(x, weight, eps)


@rms_norm_op.register_fake
def _(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("vort::rms_norm_fused_backward", mutates_args=())
def rms_norm_backward_op(
    grad: Tensor, x: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients to x and weight; an operator returns no None, so an absent one is empty."""
    dx, dweight = _gradients(grad, x, weight, eps)
    return dx, dx.new_empty(0) if dweight is None else dweight


@rms_norm_backward_op.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    dx = x.new_empty(x.shape)
    return dx, dx.new_empty(0) if weight is None else weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
    x, weight = ctx.saved_tensors
    dx, dweight = rms_norm_backward_op(grad, x, weight, ctx.eps)
    return dx, None if weight is None else dweight, None


rms_norm_op.register_autograd(_differentiate, setup_context=_save)


class _RMSNorm(torch.autograd.Function):
    """The same as the operator, without a dispatcher in between."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        y = _forward(*inputs)
        _save(ctx, inputs, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return *_gradients(grad, x, weight, ctx.eps), None


def rms_norm_fused(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return what `vort.ops.rms_norm.rms_norm` does, from GPU kernels, forward and backward.

    x `[..., D]` and weight `[D]` in bfloat16 or float32, each in its own; D in 1..1024. The sums
    of dweight are taken in a fixed order.
    """
    inputs = (x, weight, float(eps))
    if not traced(x):
        return _RMSNorm.apply(*inputs)  # type: ignore[no-any-return, no-untyped-call]
    return rms_norm_op(*inputs)  # type: ignore[no-any-return]
