"""The kernels' launches, and `vort::rms_norm_fused`: both as one differentiable function."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vort.ops.custom import Tensors, custom_op
from vort.ops.gpu.launcher import Tile, dense, launch, power_of_two

from .kernels import backward_kernel, forward_kernel

__all__ = ["rms_norm_fused"]

WHOLE = Tile(columns=0, warps=4, stages=1)
# Numbers in a tile. The backward holds three tiles at once, the forward one.
FORWARD_TILE, BACKWARD_TILE = 4096, 2048
# Enough to fill a GPU, few enough that their partial sums are short work. The same on every GPU,
# so that sums are taken in the same order.
PROGRAMS = 1024


class Inputs(NamedTuple):
    """The arguments of `rms_norm_fused`."""

    x: Tensor
    weight: Tensor | None
    eps: float


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


def _forward(inputs: Inputs) -> tuple[Tensor]:
    x, group, stride = _in_groups(inputs.x)
    weight = dense(inputs.weight)
    y = x.new_empty(x.shape)
    count, sizes = _blocks(x, FORWARD_TILE)
    with torch.cuda.device_of(x):  # the GPU that holds the data, whichever is current
        launch(
            forward_kernel, count, x, weight, y, x.numel() // x.shape[-1], inputs.eps,
            GROUP=group, STRIDE=stride, HAS_WEIGHT=weight is not None, tile=WHOLE, **sizes,
        )  # fmt: skip
    return (y,)


def _backward(inputs: Inputs, kept: Tensors, grads: Tensors, needs: Sequence[bool]) -> Tensors:
    x, group, stride = _in_groups(inputs.x)
    weight, dy = dense(inputs.weight), dense(grads[0])
    dx = x.new_empty(x.shape)
    count, sizes = _blocks(x, BACKWARD_TILE)
    programs, partial = min(count, PROGRAMS), None
    if weight is not None:
        partial = x.new_empty(programs, x.shape[-1], dtype=torch.float32)
    with torch.cuda.device_of(x):
        launch(
            backward_kernel, programs, dy, x, weight, dx, partial,
            x.numel() // x.shape[-1], inputs.eps,
            GROUP=group, STRIDE=stride, HAS_WEIGHT=weight is not None, tile=WHOLE, **sizes,
        )  # fmt: skip
    if weight is None or partial is None:
        return dx, None
    return dx, partial.sum(0).to(weight.dtype)


_rms_norm = custom_op(
    "vort::rms_norm_fused",
    Inputs,
    _forward,
    _backward,
    lambda inputs: (inputs.x.new_empty(inputs.x.shape),),
    gradients=("x", "weight"),
)


def rms_norm_fused(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return what `vort.ops.rms_norm.rms_norm` does, from GPU kernels, forward and backward.

    x `[..., D]` and weight `[D]` in bfloat16 or float32, each in its own; D in 1..1024. The sums
    of dweight are taken in a fixed order.
    """
    y: Tensor = _rms_norm(Inputs(x, weight, float(eps)))[0]
    return y
