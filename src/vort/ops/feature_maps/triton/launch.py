"""Block sizes of the feature maps' kernels, and the kernels in order."""

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vort.ops.gpu.launcher import Tile, launch, power_of_two

from .favor import favor_gradient_kernel, favor_kernel
from .hedgehog import hedgehog_gradient_kernel, hedgehog_kernel

__all__ = ["favor_backward", "favor_forward", "hedgehog_backward", "hedgehog_forward"]

# Programs that share the tokens of a weight gradient. Each leaves a sum of its own, so their number
# is bounded; several for each multiprocessor, so that the last ones to end leave few idle.
PROGRAMS = 1024


class Tiling(NamedTuple):
    """Coordinates in a chunk, padded features, and launches (columns: tokens in a block)."""

    chunk: int
    features: int
    forward: Tile
    backward: Tile


@lru_cache(maxsize=64)
def choose_tiling(head_dim: int, features: int, dtype: torch.dtype) -> Tiling:
    """Block sizes by width: a fixed table, so that a first call is short.

    Chosen so that compiled kernels keep their tiles in registers, up to 128 features. No product
    is 256 deep and 16 wide: Triton 3.6 lets that one read beyond shared memory.
    """
    padded = power_of_two(features)
    chunk = min(power_of_two(head_dim, 32), 64 if padded <= 64 else 32)
    if dtype == torch.float32:
        # ieee products run on plain multiply-adds: small tiles, no pipelining
        tile = Tile(32, 8, 1)
        return Tiling(chunk, padded, tile, tile)
    if padded <= 32:
        # at 128 registers four programs of the backward fit on a multiprocessor, not three
        return Tiling(chunk, padded, Tile(128, 4, 2), Tile(64, 4, 2, 128))
    rows = 64 if padded <= 128 else 32
    return Tiling(chunk, padded, Tile(rows, 4 if padded == 64 else 8, 2), Tile(32, 8, 2))


def _blocks(length: int, size: int) -> int:
    return -(-length // size)


def _rows(x: Tensor) -> int:
    return prod(x.shape[:-1])


def _hedgehog_sizes(x: Tensor, weight: Tensor) -> tuple[int, int, Tiling, dict[str, Any]]:
    """Tokens, heads with weights of their own, block sizes and compile-time constants."""
    head_dim, features = weight.shape[-2:]
    # a weight that all heads share sees their rows as tokens of one head
    heads = 1 if weight.ndim == 2 else weight.shape[0]
    tiling = choose_tiling(head_dim, features, x.dtype)
    constants = {
        "H": heads, "D": head_dim, "M": features, "BC": tiling.chunk, "BM": tiling.features,
    }  # fmt: skip
    return _rows(x) // heads, heads, tiling, constants


def hedgehog_forward(x: Tensor, weight: Tensor) -> Tensor:
    """Features `[..., 2 m]` in the dtype of x. All tensors contiguous."""
    tokens, heads, tiling, constants = _hedgehog_sizes(x, weight)
    out = x.new_empty(*x.shape[:-1], 2 * weight.shape[-1])
    tile = tiling.forward
    launch(
        hedgehog_kernel, heads * _blocks(tokens, tile.columns), x, weight, out, tokens,
        BT=tile.columns, tile=tile, **constants,
    )  # fmt: skip
    return out


def hedgehog_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients to x and weight. All tensors contiguous."""
    tokens, heads, tiling, constants = _hedgehog_sizes(x, weight)
    tile = tiling.backward
    chunks = _blocks(weight.shape[-2], tiling.chunk)
    parts = min(_blocks(tokens, tile.columns), max(1, PROGRAMS // (heads * chunks)))
    dx = torch.empty_like(x)
    partial = x.new_empty(parts, *weight.shape, dtype=torch.float32)
    launch(
        hedgehog_gradient_kernel, parts * heads * chunks, x, weight, grad, dx, partial, tokens,
        parts, BT=tile.columns, tile=tile, **constants,
    )  # fmt: skip
    return dx, partial.sum(0).to(weight.dtype)


def _favor_arguments(
    x: Tensor, projection: Tensor, max_norm: float | None, shift: bool, ceiling: float
) -> tuple[Tiling, tuple[Any, ...], dict[str, Any]]:
    """Block sizes, numbers and compile-time constants that both kernels take."""
    features, head_dim = projection.shape
    tiling = choose_tiling(head_dim, features, x.dtype)
    cut = 0.0 if max_norm is None else float(max_norm)
    numbers = (head_dim**-0.25, cut, ceiling, features**-0.5)
    constants = {
        "D": head_dim, "M": features, "BC": tiling.chunk, "BM": tiling.features,
        "CUT": max_norm is not None, "SHIFT": shift,
    }  # fmt: skip
    return tiling, numbers, constants


def favor_forward(
    x: Tensor, projection: Tensor, max_norm: float | None, shift: bool, ceiling: float
) -> Tensor:
    """Features `[..., m]` in the dtype of x. All tensors contiguous."""
    tiling, numbers, constants = _favor_arguments(x, projection, max_norm, shift, ceiling)
    out = x.new_empty(*x.shape[:-1], projection.shape[0])
    tile = tiling.forward
    launch(
        favor_kernel, _blocks(_rows(x), tile.columns), x, projection, out, _rows(x), *numbers,
        BT=tile.columns, tile=tile, **constants,
    )  # fmt: skip
    return out


def favor_backward(
    grad: Tensor,
    x: Tensor,
    projection: Tensor,
    max_norm: float | None,
    shift: bool,
    ceiling: float,
) -> Tensor:
    """Gradient to x. All tensors contiguous."""
    tiling, numbers, constants = _favor_arguments(x, projection, max_norm, shift, ceiling)
    dx = torch.empty_like(x)
    tile = tiling.backward
    launch(
        favor_gradient_kernel, _blocks(_rows(x), tile.columns), x, projection, grad, dx,
        _rows(x), x.shape[-1], *numbers, BT=tile.columns, tile=tile, **constants,
    )  # fmt: skip
    return dx
