"""The kernels' launches in order, and both passes as one differentiable function."""

from collections.abc import Sequence
from math import gcd
from typing import Any

import torch
from torch import Tensor

from vort.ops.custom import Some, Tensors, custom_op, traced
from vort.ops.gpu.folds import fold, fold_pair, folded_together
from vort.ops.gpu.launcher import Tile, dense, launch, power_of_two
from vort.ops.gpu.together import room_for

from .backward import sums_gradient_kernel
from .forward import heads_tile_kernel
from .inputs import Inputs, dense_rows, empty_heads, empty_pair, turn_stride
from .taps import taps_gradient_kernel

__all__ = ["heads_fused", "heads_op", "turned_again"]

# Positions in a block, for heads of up to 64 and for wider ones, in bfloat16 and in float32.
FORWARD = {2: (Tile(64, 4, 1), Tile(32, 4, 1)), 4: (Tile(32, 4, 1), Tile(32, 8, 1))}
BACKWARD = {2: (Tile(32, 2, 1), Tile(64, 8, 1)), 4: (Tile(32, 4, 1), Tile(32, 8, 1))}
# Segments side by side in the convolution's own gradients, their channels and their positions.
TAPS, WIDE, SPAN = Tile(4, 4, 1), 64, 64
# Programs that share the blocks of a backward: each leaves sums of its own.
PROGRAMS = 1056


def _constants(inputs: Inputs, tiles: dict[int, Any]) -> dict[str, Any]:
    """What kernels are compiled for."""
    x, dim = inputs.x, inputs.dim
    # a single row lies nowhere in particular
    stride = x.stride(1) if x.shape[1] > 1 else x.shape[2]
    return {
        "HQ": inputs.num_heads, "HK": inputs.num_key_value_heads, "D": dim,
        "BH": power_of_two(dim // 2), "M": inputs.features, "BM": power_of_two(inputs.features),
        "W": inputs.taps, "BT": _tile(inputs, tiles).columns, "STRIDE": stride,
        "UNIT": gcd(8, x.stride(0)),
        "HAS_STATE": inputs.state is not None, "HAS_AGE": inputs.age is not None,
        "NORM": inputs.q_norm is not None, "TURN": inputs.cos is not None,
        "MAPPED": inputs.q_map is not None,
    }  # fmt: skip


def _tile(inputs: Inputs, tiles: dict[int, Any]) -> Tile:
    tile: Tile = tiles[inputs.x.element_size()][inputs.dim > 64]
    return tile


def _taps(weight: Tensor | None) -> Tensor | None:
    """`[W, C]` float32: threads have neighbouring channels."""
    if weight is None:
        return None
    return torch.empty(
        weight.shape[::-1], dtype=torch.float32, device=weight.device
    ).copy_(weight.T)  # fmt: skip


def _forward(inputs: Inputs) -> Tensors:
    inputs = dense_rows(inputs)
    x = inputs.x
    batch, length = x.shape[:2]
    constants = _constants(inputs, FORWARD)
    blocks = -(-length // constants["BT"])
    outputs = empty_heads(inputs)
    taps = _taps(inputs.weight)
    launch(
        heads_tile_kernel, batch * blocks * (x.shape[2] // inputs.dim), x, taps, *inputs[2:10],
        *outputs[:5], length, x.stride(0) // constants["UNIT"], blocks, turn_stride(inputs),
        inputs.eps, tile=_tile(inputs, FORWARD), **constants,
    )  # fmt: skip
    v = outputs[2]
    again = v.view_as(v) if inputs.twice and v is not None else None
    # the backward has use for features, which their reader keeps as well, and none for heads
    kept = outputs[:2] if inputs.q_map is not None else (None, None)
    return *outputs[:5], again, *kept, taps


def _pair(a: Tensor | None, b: Tensor | None, like: Sequence[Any]) -> list[Tensor | None]:
    """Both or neither: a gradient that did not come alone is zeros."""
    if a is None and b is None:
        return [None, None]
    return [
        torch.zeros_like(y) if g is None else dense(g) for g, y in zip((a, b), like, strict=True)
    ]


@folded_together()
def _backward(inputs: Inputs, kept: Tensors, grads: Tensors, needs: Sequence[bool]) -> Tensors:
    inputs = dense_rows(inputs)
    x, weight = inputs.x, inputs.weight
    batch, length, channels = x.shape
    dim, heads, kv_heads = inputs.dim, inputs.num_heads, inputs.num_key_value_heads
    constants = _constants(inputs, BACKWARD)
    tile = _tile(inputs, BACKWARD)
    blocks = -(-length // tile.columns)
    parts = min(batch * blocks, max(1, PROGRAMS // (heads + kv_heads)))
    like: Any = empty_heads(inputs) if any(g is None for g in grads[:5]) else grads
    dq, dk = _pair(grads[0], grads[1], like[:2])
    dq_turned, dk_turned = _pair(grads[3], grads[4], like[3:5])
    wide: dict[str, Any] = {"dtype": torch.float32}
    # those of queries and of keys side by side, to be folded together
    norms = maps = None
    sums: list[Tensor | None] = [None] * 4
    if inputs.q_norm is not None:
        # rows that the fewer heads of keys leave out add nothing
        make = x.new_empty if heads == kv_heads else x.new_zeros
        norms = make(2, parts * max(heads, kv_heads), dim, **wide)
        sums[:2] = norms[0], norms[1]
    if inputs.q_map is not None:
        maps = x.new_empty(2, parts, *inputs.q_map.shape, **wide)
        sums[2:] = maps[0], maps[1]
    dx = room_for(x)
    others = channels - kv_heads * dim
    du = dx if weight is None else x.new_empty(batch, length, others)
    if not kept:  # an operator keeps none of it
        mapped = inputs.q_map is not None
        kept = _forward(inputs)[6:] if mapped else (None, None, _taps(weight))
    features, taps = kept[:2], kept[2]
    launch(
        sums_gradient_kernel, parts * (heads + kv_heads), x, taps, *inputs[2:10], *features,
        dq, dk, dq_turned, dk_turned, du, *sums, parts, batch * blocks, blocks, length,
        x.stride(0) // constants["UNIT"], turn_stride(inputs), inputs.eps, OUT=du.stride(1),
        tile=tile, **constants,
    )  # fmt: skip
    dv, again = dense(grads[2]), dense(grads[5])
    if dv is None:
        dv, again = again, None
    if dv is None:
        dv = torch.zeros_like(like[2])
    dweight = None
    if weight is None:
        values = dx[..., others:]
        values.copy_(dv.view_as(values))
        if again is not None:
            values += again.view_as(values)
    elif taps is not None:
        dtaps = _through_taps(inputs, constants, taps, du, dv, again, dx)
        dweight = fold(dtaps, weight.dtype)
    return (
        dx,
        dweight,
        *_fold_pair(norms, inputs.q_norm, inputs.k_norm),
        *_fold_pair(maps, inputs.q_map, inputs.k_map),
    )


def _fold_pair(partial: Tensor | None, q: Tensor | None, k: Tensor | None) -> Tensors:
    """Sums `[2, parts, ...]` of queries and keys as the gradients to both."""
    if partial is None or q is None or k is None:
        return None, None
    if q.dtype == k.dtype:
        return fold_pair(partial, q.dtype)
    return fold(partial[0], q.dtype), fold(partial[1], k.dtype)


def _through_taps(
    inputs: Inputs, constants: dict[str, Any], taps: Tensor, du: Tensor, dv: Tensor,
    again: Tensor | None, dx: Tensor,
) -> Tensor:  # fmt: skip
    """Writes dx; parts of dweight `[parts, C, W]`."""
    x, values = inputs.x, inputs.num_key_value_heads * inputs.dim
    batch, length, channels = x.shape
    reached = length + (inputs.taps - 1) * (inputs.state is not None)
    span = min(SPAN, power_of_two(reached, 4))
    per_row = -(-reached // span)
    parts = -(-batch * per_row // TAPS.columns)
    columns = -(-(channels - values) // WIDE) + -(-values // WIDE)
    dtaps = x.new_empty(parts, channels, inputs.taps, dtype=torch.float32)
    names = ("W", "STRIDE", "UNIT", "HAS_STATE", "HAS_AGE")
    launch(
        taps_gradient_kernel, parts * columns, x, taps, inputs.state, inputs.age, du, dv, again,
        dx, dtaps, batch * per_row, per_row, length, x.stride(0) // constants["UNIT"],
        C=channels, CV=values, BT=TAPS.columns, BC=WIDE, SPAN=span, OUT=dx.stride(1), tile=TAPS,
        **{n: constants[n] for n in names},
    )  # fmt: skip
    return dtaps


heads_op = custom_op(
    "vort::heads",
    Inputs,
    _forward,
    _backward,
    empty_heads,
    outputs=("q", "k", "v", "q_turned", "k_turned", "v_again"),
    shown=6,
    gradients=("x", "weight", "q_norm", "k_norm", "q_map", "k_map"),
)


def heads_fused(inputs: Inputs) -> Some:
    """Queries, keys and values `[B, T, heads, D]`, the former two turned, or None twice; values.

    x `[B, T, C]`, weight `[C, W]` with W in 2..4, or None: neither convolution nor silu; state
    `[B, W - 1, C]` or None, age `[T]` or None: positions since a packed sequence began; q_norm and
    k_norm `[D]` or None; cos and sin `[T or B T, D / 2]` of the angles, or None; q_map and k_map
    `[heads, D, M]` or None: with them queries and keys are features `[B, T, heads, 2 M]`. bfloat16
    or float32. No gradient goes to the state. twice: values are handed out again, so that gradients
    from two readers are added in the kernel; only where nothing traces, since an operator may not
    return a tensor twice.
    """
    return heads_op(inputs._replace(twice=inputs.twice and not traced(inputs.x)))


def turned_again(inputs: Inputs, taps: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Turned queries and keys once more, without a backward: no map, no values.

    taps: those of the weight as the forward's kernel read them, where they were kept.
    """
    inputs = dense_rows(inputs)
    x = inputs.x
    constants = _constants(inputs, FORWARD) | {"MAPPED": False}
    blocks = -(-x.shape[1] // constants["BT"])
    heads = inputs.num_heads + inputs.num_key_value_heads
    turned = empty_pair(inputs, inputs.dim)
    taps = _taps(inputs.weight) if taps is None else taps
    launch(
        heads_tile_kernel, x.shape[0] * blocks * heads, x, taps, *inputs[2:8],
        None, None, None, None, None, *turned, x.shape[1], x.stride(0) // constants["UNIT"],
        blocks, turn_stride(inputs), inputs.eps, tile=_tile(inputs, FORWARD), **constants,
    )  # fmt: skip
    return turned
