"""How a call is cut: block sizes by shape, and the spans of its sequences.

Sizes come from a fixed table instead of autotuning, so that a first call is short.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from vort.ops.bounds import made_once
from vort.ops.gpu.launcher import Tile, power_of_two
from vort.ops.retention.inputs import Inputs, b_rows, count_sequences

__all__ = ["Spans", "Tiling", "cdiv", "choose_tiling", "rate_stride"]

NORMALIZER_CODES = {"none": 0, "decayed": 1, "undecayed": 2}


def cdiv(a: int, b: int) -> int:
    """How many of b hold a."""
    return -(-a // b)


def rate_stride(log_decay: Tensor) -> int:
    """From one head's rates to the next one's; 0: all heads share them."""
    return log_decay.shape[-1] if log_decay.dim() == 2 else 0


@dataclass(frozen=True)
class Tiling:
    """How one shape is cut.

    span: tokens between stored states, at least two blocks; rows: tokens in one matrix block.
    scales: S padded for products over scales; keys: K padded. state_rows, state_keys, state_scales:
    what the walk over states takes at once. The rest are the kernels' launches.
    """

    span: int
    rows: int
    scales: int
    keys: int
    state_rows: int
    state_keys: int
    state_scales: int
    state: Tile
    output: Tile
    query: Tile
    key: Tile
    precision: str

    def query_form(self, decay_grad: bool) -> tuple[int, Tile]:
        """Parts of a block of columns that `lean_query_kernel` takes at a time, and its launch.

        0: it is left to `query_kernel`, which has room for all. Halves leave 168 registers, and
        three programs on a multiprocessor instead of two. Where there is more to hold (gradients
        to decays, many scales), or keys and values differ in width, ptxas 12.8 spills, or mixes up
        descriptors; in spans of two blocks it takes products of halves apart.
        """
        widths = self.keys, self.query.columns
        served = self.rows == 64 and self.query.warps == 4 and self.scales <= 16
        if decay_grad or not served:
            return 0, self.query
        if max(widths) <= 64 and self.span > 2 * self.rows:
            return 2, self.query._replace(registers=168)
        return int(min(widths) > 64), self.query


@lru_cache(maxsize=256)
def choose_tiling(
    key_dim: int, value_dim: int, num_scales: int, dtype: torch.dtype, span: int | None
) -> Tiling:
    """Block sizes for one shape; a `span` given is rounded up to a power of two."""
    keys, values = power_of_two(key_dim), power_of_two(value_dim)
    widest = max(keys, values)
    scales = power_of_two(num_scales)
    state_scales = min(2, num_scales)
    if dtype == torch.float32:
        # ieee products run on plain multiply-adds: small tiles, no pipelining.
        # Blocks of 16 follow decays of any speed to float32's last bits (see column_factors).
        rows = 16
        span = 64 if span is None else max(2 * rows, power_of_two(span))
        return Tiling(
            span=span,
            rows=rows,
            scales=scales,
            keys=keys,
            state_rows=min(span, 32),
            state_keys=min(keys, 64),
            state_scales=state_scales,
            state=Tile(min(values, 32), 4, 1),
            output=Tile(min(values, 64), 8, 1),
            query=Tile(min(values, 64), 8, 1),
            key=Tile(min(values, 64), 8, 1),
            precision="ieee",
        )
    # More states cost more traffic per span, more span costs more matrix work per token.
    if span is None:
        span = 128 if num_scales <= 4 else 256
    # not a single block: ptxas 12.8 then mixes up addresses in the queries' kernel at S = 1
    span = max(128, power_of_two(span))
    wide = widest > 64
    return Tiling(
        span=span,
        rows=64,
        scales=scales,
        keys=keys,
        state_rows=64,
        state_keys=min(keys, 128),
        state_scales=state_scales,
        # 128 registers: four programs on a multiprocessor, or two of twice the warps
        state=Tile(min(values, 64), 4 if keys <= 64 else 8, 3, 128),
        output=Tile(min(values, 64), 4, 3, None if wide else 168),
        query=Tile(min(values, 128), 4 if widest <= 128 else 8, 2 if wide else 3),
        key=Tile(min(values, 128), 8 if wide else 4, 2 if widest > 128 else 3),
        precision="tf32",
    )


@dataclass(frozen=True)
class Spans:
    """One call: its sizes, where its spans lie, and what the kernels are told at compile time."""

    length: int
    sequences: int
    heads: int
    num_scales: int
    b_rows: int
    key_dim: int
    value_dim: int
    normalizer: int
    include_self: bool
    tiling: Tiling
    slots: int
    spans: int
    table: Tensor | None
    seq_span: Tensor | None
    cu: Tensor | None

    @classmethod
    def of(cls, inputs: Inputs) -> "Spans":
        """Cut the sequences into spans, without reading `cu_seqlens` on the host."""
        q, cu_seqlens, normalizer = inputs.q, inputs.cu_seqlens, inputs.normalizer
        batch, length, heads, key_dim = q.shape
        value_dim, num_scales = inputs.v.shape[-1], inputs.write.shape[-1]
        tiling = choose_tiling(key_dim, value_dim, num_scales, q.dtype, inputs.chunk_size)
        sequences = count_sequences(inputs)
        table = seq_span = None
        if cu_seqlens is None:
            spans = -(-length // tiling.span)
            slots = sequences * spans
        else:
            # an upper bound: each sequence has at most one span that is not full
            spans, slots = 0, batch * length // tiling.span + sequences
            table, seq_span = made_once(
                cu_seqlens,
                ("spans", tiling.span, slots),
                partial(_span_table, cu_seqlens, tiling.span, slots),
            )
        return cls(
            length, sequences, heads, num_scales, b_rows(normalizer, num_scales), key_dim,
            value_dim, NORMALIZER_CODES[normalizer], inputs.include_self, tiling, slots, spans,
            table, seq_span, cu_seqlens,
        )  # fmt: skip

    @property
    def keeps_states(self) -> bool:
        """Whether backward finds the states of forward, or makes them again.

        Kept where they take no more memory than keys and values do.
        """
        width = self.key_dim + self.value_dim
        return self.num_scales * self.key_dim * self.value_dim <= width * self.tiling.span

    @property
    def whole(self) -> bool:
        """Whether every span is full."""
        return self.cu is None and self.length % self.tiling.span == 0

    @property
    def row_blocks(self) -> int:
        """Blocks of rows over all span slots."""
        return self.slots * (self.tiling.span // self.tiling.rows)

    def wanted(self, asked: Tensor | None) -> Tensor | None:
        """`[row_blocks]`, 1 where a block holds a place asked for; None where all are wanted."""
        if asked is None:
            return None
        rows, blocks = self.tiling.rows, self.tiling.span // self.tiling.rows
        if self.cu is None or self.seq_span is None:
            at, slot = asked % max(self.length, 1), asked // max(self.length, 1) * self.spans
        else:
            owner = torch.searchsorted(self.cu, asked.to(self.cu.dtype), right=True) - 1
            at, slot = asked - self.cu[owner], self.seq_span[owner]
        found = torch.zeros(self.row_blocks, dtype=torch.int32, device=asked.device)
        return found.index_fill_(0, slot * blocks + at // rows, 1)

    def common(self) -> dict[str, Any]:
        """Compile-time sizes every kernel takes."""
        return {
            "H": self.heads,
            "S": self.num_scales,
            "K": self.key_dim,
            "V": self.value_dim,
            "SPAN": self.tiling.span,
            "NORM": self.normalizer,
            "VARLEN": self.cu is not None,
        }

    def block(self) -> dict[str, Any]:
        """Compile-time sizes of the kernels that work on blocks of rows."""
        tiling = self.tiling
        return self.common() | {
            "SP": tiling.scales,
            "BK": tiling.keys,
            "BT": tiling.rows,
            "SELF": self.include_self,
            "PREC": tiling.precision,
        }


def _span_table(cu: Tensor, span: int, slots: int) -> tuple[Tensor, Tensor]:
    """First token and end of every span slot `[slots, 2]`; the first slot of every sequence."""
    counts = (cu[1:] - cu[:-1] + span - 1) // span
    ends = counts.cumsum(0)
    first = ends - counts
    slot = torch.arange(slots, device=cu.device)
    owner = torch.searchsorted(ends, slot, right=True).clamp(max=counts.shape[0] - 1)
    start = cu[owner] + (slot - first[owner]) * span
    end = torch.minimum(start + span, cu[owner + 1])
    table = torch.stack([start, end], 1) * (slot < ends[-1:]).unsqueeze(1)
    return table.contiguous(), first.contiguous()
