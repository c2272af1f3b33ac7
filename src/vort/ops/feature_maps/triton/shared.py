# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""What the kernels of both maps share: their product, and their block sizes.

The product loses nothing of a float32 weight although the tensor cores multiply bfloat16. A float32
number is the sum of two bfloat16 numbers up to its 16th bit. So a tile of bfloat16 inputs times
float32 weights is two products in bfloat16 with float32 sums: what one product in tf32 costs, with
six more bits of the weight. An exponential follows: an error of the logit is a relative error of
the feature.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vort.ops.gpu.launcher import Tile, power_of_two

__all__ = ["Tiling", "blocks", "choose_tiling", "product"]


@triton.jit
def product(a, b, acc, NARROW: tl.constexpr):
    """``acc + a b`` with b in float32 and a in NARROW, the type of the inputs, or in float32."""
    if tl.float32 == NARROW:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    else:
        high = b.to(NARROW)
        low = (b - high.to(tl.float32)).to(NARROW)
        a_high = a.to(NARROW)
        acc = tl.dot(a_high, low, acc)
        if a.dtype == tl.float32:
            a_low = (a - a_high.to(tl.float32)).to(NARROW)
            acc = tl.dot(a_low, high, acc)
        acc = tl.dot(a_high, high, acc)
    return acc


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


def blocks(length: int, size: int) -> int:
    """How many blocks of a size hold so many."""
    return -(-length // size)
