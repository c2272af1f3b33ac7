"""The kernels in order: attend; then gradients of queries, then of keys."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vort.ops.gpu.launcher import Tile, launch, power_of_two

from .backward import key_kernel, query_kernel
from .forward import attend_kernel

__all__ = ["run_backward", "run_forward"]


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


def _constants(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor | None, valid: Tensor | None, tiling: Tiling
) -> dict[str, Any]:
    """Compile-time sizes every kernel takes."""
    return {
        "H": q.shape[2],
        "HKV": k.shape[2],
        "D": q.shape[3],
        "V": v.shape[3],
        "BD": power_of_two(q.shape[3]),
        "BV": power_of_two(v.shape[3]),
        "HAS_START": start is not None,
        "HAS_VALID": valid is not None,
        "PREC": tiling.precision,
    }


def _tiling(q: Tensor, v: Tensor) -> Tiling:
    return choose_tiling(max(power_of_two(q.shape[3]), power_of_two(v.shape[3])), q.dtype)


def _blocks(length: int, size: int) -> int:
    return -(-length // size)


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    valid: Tensor | None,
    window: int,
    scale: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Output, entropy (or None) and base-2 log of every softmax's sum. All tensors contiguous."""
    batch, length, heads, _ = q.shape
    tiling = _tiling(q, v)
    o = v.new_empty(batch, length, heads, v.shape[-1])
    lse = q.new_empty(batch, length, heads, dtype=torch.float32)
    entropy = torch.empty_like(lse) if with_entropy else None
    window = min(window, k.shape[1])
    launch(
        attend_kernel, batch * heads * _blocks(length, tiling.rows),
        q, k, v, start, valid, o, lse, entropy, length, k.shape[1] - length, window, scale,
        BM=tiling.rows, BN=tiling.attend.columns, ENTROPY=with_entropy, tile=tiling.attend,
        **_constants(q, k, v, start, valid, tiling),
    )  # fmt: skip
    return o, entropy, lse


def run_backward(
    do: Tensor,
    dentropy: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    valid: Tensor | None,
    o: Tensor,
    entropy: Tensor | None,
    lse: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to q, k and v. All tensors contiguous."""
    batch, length, heads, _ = q.shape
    tiling = _tiling(q, v)
    constants = _constants(q, k, v, start, valid, tiling) | {"ENTROPY": dentropy is not None}
    window = min(window, k.shape[1])
    sizes = (length, k.shape[1] - length, window, scale)
    dq, dk, dv, shared = (torch.empty_like(x) for x in (q, k, v, lse))
    launch(
        query_kernel, batch * heads * _blocks(length, tiling.rows),
        q, k, v, start, valid, o, lse, entropy, do, dentropy, dq, shared, *sizes,
        BM=tiling.rows, BN=tiling.query.columns, tile=tiling.query, **constants,
    )  # fmt: skip
    launch(
        key_kernel, batch * k.shape[2] * _blocks(k.shape[1], tiling.rows),
        q, k, v, start, valid, lse, shared, do, dentropy, dk, dv, *sizes,
        BM=tiling.key.columns, BN=tiling.rows, tile=tiling.key, **constants,
    )  # fmt: skip
    return dq, dk, dv
