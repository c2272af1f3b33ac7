"""The kernels in order, and `vort::local_attention_fused`: all as one differentiable function."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vort.ops.custom import Some, Tensors, custom_op
from vort.ops.gpu.launcher import Tile, dense, launch, power_of_two
from vort.ops.local_attention.block import Inputs
from vort.ops.local_attention.checks import WIDEST

from .kernels import attend_kernel, attended_key_kernel, attended_query_kernel
from .walk import attended_walk_kernel

__all__ = ["attend_back", "attend_fused", "attend_op", "room_for_dots"]

# Launches of the walk that makes all gradients, by type; float32 has no registers for it.
WALKS = {torch.bfloat16: Tile(64, 4, 1)}
# The widest heads and the most blocks after its own, likewise.
WIDEST_WALKED, FURTHEST = 64, 2
# Walks that run at once: two on each multiprocessor of a Hopper GPU.
RESIDENT = 264


class Tiling(NamedTuple):
    """Tokens in a program's own block, launches (columns: tokens taken in a step), precision."""

    rows: int
    attend: Tile
    query: Tile
    key: Tile
    precision: str


@lru_cache(maxsize=64)
def choose_tiling(widest: int, dtype: torch.dtype) -> Tiling:
    """Block sizes by head dimension: a fixed table, so that a first call is short."""
    if dtype == torch.float32:
        # ieee products run on plain multiply-adds: small tiles, no pipelining
        tile = Tile(32, 4 if widest <= 64 else 8, 1)
        return Tiling(32, tile, tile, tile, "ieee")
    if widest <= 64:
        # few steps in a walk: more programs on a multiprocessor gain more than deeper pipelines
        return Tiling(64, Tile(64, 4, 3, 128), Tile(32, 4, 3), Tile(32, 4, 2), "tf32")
    return Tiling(64, Tile(64, 4, 2), Tile(32, 4, 2), Tile(32, 4, 2), "tf32")


def _blocks(length: int, size: int) -> int:
    return -(-length // size)


def _reach(inputs: Inputs, rows: int) -> int:
    """Blocks after its own that a block of keys is seen from."""
    return max(1, _blocks(min(inputs.window, inputs.k.shape[1]) - 1, rows))


def _walks(inputs: Inputs, tiling: Tiling) -> bool:
    """Whether one walk can make all gradients."""
    q, k, v, _, valid = inputs[:5]
    narrow = max(q.shape[3], v.shape[3]) <= WIDEST_WALKED and q.dtype in WALKS
    # each head has keys of its own, and every key a query
    alike = q.shape[1:3] == k.shape[1:3] and valid is None
    return narrow and alike and _reach(inputs, tiling.rows) <= FURTHEST


@lru_cache(maxsize=64)
def choose_run(sequences: int, blocks: int, reach: int) -> int:
    """Blocks in a walk: as few steps after one another as can be, `reach` of each for nothing.

    >>> choose_run(4 * 16, 128, 2)
    32
    """

    def steps(run: int) -> int:
        return _blocks(sequences * _blocks(blocks, run), RESIDENT) * (run + reach)

    return min(range(1, min(blocks, 64) + 1), key=steps)


def _tiling(inputs: Inputs) -> Tiling:
    widest = max(inputs.q.shape[3], inputs.v.shape[3])
    return choose_tiling(power_of_two(widest), inputs.q.dtype)


def _arguments(inputs: Inputs) -> tuple[Tiling, list[Any], tuple[Any, ...], dict[str, Any]]:
    """Block sizes; contiguous q, k, v, start and valid; numbers; compile-time constants."""
    q, k, v, start, valid, window, scale, _ = inputs
    wide_q, wide_v = power_of_two(q.shape[3]), power_of_two(v.shape[3])
    tiling = _tiling(inputs)
    numbers = (q.shape[1], k.shape[1] - q.shape[1], min(window, k.shape[1]), scale)
    constants = {
        "H": q.shape[2], "HKV": k.shape[2], "D": q.shape[3], "V": v.shape[3], "BD": wide_q,
        "BV": wide_v, "HAS_START": start is not None, "HAS_VALID": valid is not None,
        "PREC": tiling.precision,
    }  # fmt: skip
    return tiling, [dense(x) for x in inputs[:5]], numbers, constants


def _forward(inputs: Inputs) -> Tensors:
    """Output, entropy (or None) and base-2 log of every softmax's sum."""
    if inputs.scale < 0:
        inputs = inputs._replace(q=-inputs.q, scale=-inputs.scale)
    tiling, tensors, numbers, constants = _arguments(inputs)
    batch, length, heads, _ = inputs.q.shape
    o, entropy, lse = _shapes(inputs)
    launch(
        attend_kernel, batch * heads * _blocks(length, tiling.rows),
        *tensors, o, lse, entropy, *numbers,
        BM=tiling.rows, BN=tiling.attend.columns, ENTROPY=inputs.with_entropy,
        tile=tiling.attend, **constants,
    )  # fmt: skip
    return o, entropy, lse


def room_for_dots(inputs: Inputs, lse: Tensor) -> Tensor | None:
    """Uninitialised, for do·o of every query, where `attend_back` can do with it instead of o.

    lse: what the forward has found. Of q, k and v shapes and types count alone.
    """
    return torch.empty_like(lse) if _walks(inputs, _tiling(inputs)) else None


def attend_back(
    inputs: Inputs, kept: Some, grads: Some, needs: Sequence[bool], dots: Tensor | None = None
) -> Tensors:
    """The backward of `attend_op`; dots: do·o, in the room that `room_for_dots` made."""
    tiling, tensors, numbers, constants = _arguments(inputs)
    q, k, v, *_ = tensors
    o, entropy, lse = kept
    do, dentropy = (dense(x) for x in grads)
    do = torch.zeros_like(o) if do is None else do
    batch, length, heads, _ = q.shape
    constants["ENTROPY"] = dentropy is not None
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    if _walks(inputs, tiling):
        del constants["HKV"], constants["HAS_VALID"]
        reach, blocks = _reach(inputs, tiling.rows), _blocks(length, tiling.rows)
        run = choose_run(batch * heads, blocks, reach)
        _, _, window, scale = numbers
        launch(
            attended_walk_kernel, batch * heads * _blocks(blocks, run),
            *tensors[:4], o if dots is None else None, dots, lse, entropy, do, dentropy,
            dq, dk, dv, length, window, run, scale, B=tiling.rows, REACH=reach,
            LONG=window >= reach * tiling.rows, tile=WALKS[q.dtype], **constants,
        )  # fmt: skip
        return dq, dk, dv
    shared = torch.empty_like(lse)
    slopes = None if dentropy is None else torch.empty_like(lse)
    launch(
        attended_query_kernel, batch * heads * _blocks(length, tiling.rows),
        *tensors, o, lse, entropy, do, dentropy, dq, shared, slopes, *numbers,
        BM=tiling.rows, BN=tiling.query.columns, tile=tiling.query, **constants,
    )  # fmt: skip
    launch(
        attended_key_kernel, batch * k.shape[2] * _blocks(k.shape[1], tiling.rows),
        *tensors, lse, shared, slopes, do, dk, dv, *numbers,
        BM=tiling.key.columns, BN=tiling.rows, tile=tiling.key, **constants,
    )  # fmt: skip
    return dq, dk, dv


def _shapes(inputs: Inputs) -> Tensors:
    batch, length, heads, _ = inputs.q.shape
    block = _tiling(inputs).rows
    lse = inputs.q.new_empty(batch, heads, _blocks(length, block) * block, dtype=torch.float32)
    o = inputs.v.new_empty(batch, length, heads, inputs.v.shape[-1])
    entropy = None
    if inputs.with_entropy:
        entropy = o.new_empty(batch, length, heads, dtype=torch.float32)
    return o, entropy, lse


attend_op = custom_op(
    "vort::local_attention_fused",
    Inputs,
    _forward,
    attend_back,
    _shapes,
    outputs=("o", "entropy", "lse"),
    shown=2,
    saved=("o", "entropy", "lse"),
    gradients=("q", "k", "v"),
)


def attend_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    *,
    scale: float,
    start: Tensor | None = None,
    valid: Tensor | None = None,
    return_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return what `attend_blockwise` returns, from fused GPU kernels, forward and backward.

    q, k and v share one dtype, bfloat16 or float32 (products in full float32 then); sums and the
    entropy are float32. Head dimensions in 1..128, any length, window and number of prefix keys.
    """
    if q.dtype not in (torch.bfloat16, torch.float32) or not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            "q, k and v must share one dtype, bfloat16 or float32, "
            f"got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        raise ValueError(
            f"head dimensions must be at most {WIDEST}, got {q.shape[-1]} and {v.shape[-1]}"
        )
    o, entropy = attend_op(Inputs(q, k, v, start, valid, window, scale, return_entropy))
    return o, entropy
