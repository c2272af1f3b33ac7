"""Block sizes by shape: a fixed table instead of autotuning, so that a first call is short."""

from dataclasses import dataclass
from functools import lru_cache

import torch

from vort.ops.gpu.launcher import Tile, power_of_two

__all__ = ["Tiling", "choose_tiling"]


@dataclass(frozen=True)
class Tiling:
    """How one shape is cut.

    span: tokens between stored states, at least two blocks; rows: tokens in one matrix block.
    modes: S padded for products over modes; keys: K padded. state_rows, state_keys, state_modes:
    what the walk over states takes at once. The rest are the kernels' launches.
    """

    span: int
    rows: int
    modes: int
    keys: int
    state_rows: int
    state_keys: int
    state_modes: int
    state: Tile
    output: Tile
    query: Tile
    key: Tile
    precision: str


@lru_cache(maxsize=256)
def choose_tiling(
    key_dim: int, value_dim: int, terms: int, dtype: torch.dtype, span: int | None
) -> Tiling:
    """Block sizes for one shape; a `span` given is rounded up to a power of two."""
    keys, values = power_of_two(key_dim), power_of_two(value_dim)
    widest = max(keys, values)
    modes = power_of_two(terms)
    state_modes = min(2, terms)
    if dtype == torch.float32:
        # ieee products run on plain multiply-adds: small tiles, no pipelining.
        # Blocks of 16 follow decays of any speed to float32's last bits (see column_factors).
        rows = 16
        span = 64 if span is None else max(2 * rows, power_of_two(span))
        return Tiling(
            span=span,
            rows=rows,
            modes=modes,
            keys=keys,
            state_rows=min(span, 32),
            state_keys=min(keys, 64),
            state_modes=state_modes,
            state=Tile(min(values, 32), 4, 1),
            output=Tile(min(values, 64), 8, 1),
            query=Tile(min(values, 64), 8, 1),
            key=Tile(min(values, 64), 8, 1),
            precision="ieee",
        )
    # More states cost more traffic per span, more span costs more matrix work per token.
    if span is None:
        span = 128 if terms <= 4 else 256
    # not a single block: ptxas 12.8 then mixes up addresses in the queries' kernel at S = 1
    span = max(128, power_of_two(span))
    wide = widest > 64
    return Tiling(
        span=span,
        rows=64,
        modes=modes,
        keys=keys,
        state_rows=64,
        state_keys=min(keys, 128),
        state_modes=state_modes,
        # 128 registers: four programs on a multiprocessor, or two of twice the warps
        state=Tile(min(values, 64), 4 if keys <= 64 else 8, 3, 128),
        output=Tile(min(values, 64), 4, 3, None if wide else 168),
        query=Tile(min(values, 128), 4 if widest <= 128 else 8, 2 if wide else 3),
        key=Tile(min(values, 128), 8 if wide else 4, 2 if widest > 128 else 3),
        precision="tf32",
    )
