"""The kernels in order: states, outputs; then states both ways and gradients."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vort.ops.gpu.launcher import Tile, launch, power_of_two

from .backward import key_kernel, normalizer_kernel, query_kernel
from .carry import carry_kernel
from .forward import output_kernel
from .states import state_kernel
from .tiling import Tiling, choose_tiling
from .weights import weights_kernel

__all__ = ["Problem", "run_backward", "run_forward"]

# Programs of the walk over states for a large GPU: four run at once on each of 132
# multiprocessors, and as many again take the place of those that end early (b costs less than G,
# and fast modes less than slow ones).
RESIDENT = 1050
# Segments cost a second pass and run closer together: fewer than this gain nothing, nor do they
# where this many programs walk over fewer tokens than these.
FEWEST_SEGMENTS = 5
MANY_PROGRAMS = 100
FEW_TOKENS = 16_384
# Parts of a segment in the first pass, where programs differ in how far they look back.
FINE = 4
ROWWISE = Tile(columns=0, warps=4, stages=1)
FOLD = Tile(columns=256, warps=1, stages=1)

# G and b of the same states; None where there are none.
Pair = tuple[Tensor | None, Tensor | None]
NOTHING: Pair = (None, None)


@dataclass(frozen=True)
class Problem:
    """One call: its sizes, where its spans lie, and what the kernels are told at compile time."""

    tokens: int
    length: int
    sequences: int
    heads: int
    terms: int
    key_dim: int
    value_dim: int
    normalizer: int
    include_self: bool
    eps: float
    tiling: Tiling
    slots: int
    spans: int
    table: Tensor | None
    seq_span: Tensor | None
    cu: Tensor | None

    @classmethod
    def of(
        cls,
        q: Tensor,
        v: Tensor,
        terms: int,
        cu_seqlens: Tensor | None,
        normalizer: int,
        include_self: bool,
        eps: float,
        span: int,
    ) -> "Problem":
        """Cut the sequences into spans, without reading `cu_seqlens` on the host."""
        batch, length, heads, key_dim = q.shape
        value_dim = v.shape[-1]
        tiling = choose_tiling(key_dim, value_dim, terms, q.dtype, span or None)
        tokens = batch * length
        table = seq_span = None
        if cu_seqlens is None:
            sequences, spans = batch, -(-length // tiling.span)
            slots = sequences * spans
        else:
            sequences = cu_seqlens.shape[0] - 1
            # an upper bound: each sequence has at most one span that is not full
            spans, slots = 0, tokens // tiling.span + sequences
            table, seq_span = _span_table(cu_seqlens, tiling.span, slots)
        return cls(
            tokens, length, sequences, heads, terms, key_dim, value_dim, normalizer,
            include_self, eps, tiling, slots, spans, table, seq_span, cu_seqlens,
        )  # fmt: skip

    @property
    def norm_terms(self) -> int:
        """Rows of b for each head."""
        return (0, self.terms, 1)[self.normalizer]

    @property
    def keeps_states(self) -> bool:
        """Whether backward finds the states of forward, or makes them again.

        Kept where they take no more memory than keys and values do.
        """
        width = self.key_dim + self.value_dim
        return self.terms * self.key_dim * self.value_dim <= width * self.tiling.span

    @property
    def row_blocks(self) -> int:
        """Blocks of rows over all span slots."""
        return self.slots * (self.tiling.span // self.tiling.rows)

    def common(self) -> dict[str, Any]:
        """Compile-time sizes every kernel takes."""
        return {
            "H": self.heads,
            "S": self.terms,
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
            "SP": tiling.modes,
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


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _rate_stride(log_decay: Tensor) -> int:
    return log_decay.shape[-1] if log_decay.dim() == 2 else 0


def _segments(programs: int, spans: int, span: int) -> int:
    """Pieces a sequence is cut into, so that `programs` walks fill the GPU; 1 if it is not cut."""
    if programs >= MANY_PROGRAMS and spans * span < FEW_TOKENS:
        return 1
    segments = min(RESIDENT // max(programs, 1), spans // 2)
    return segments if segments >= FEWEST_SEGMENTS else 1


class States(NamedTuple):
    """G (dtype of the inputs) and b (float32) at every span, and what else a walk leaves.

    The last states if asked for, the gradient to the decays, and what each segment started from,
    for a later walk over the same tokens; None where there is nothing.
    """

    G: Tensor
    b: Tensor | None
    G_last: Tensor | None
    b_last: Tensor | None
    grad: Tensor | None
    carry: Pair


def _states(
    problem: Problem,
    x: Tensor,
    y: Tensor,
    weight: Tensor | None,
    log_decay: Tensor,
    first: Pair,
    keep_last: bool,
    shift: Tensor | None = None,
    reverse: bool = False,
    others: Pair = NOTHING,
    carry: Pair = NOTHING,
) -> States:
    """Walk over the sequences; a `carry` from a walk over the same tokens saves the first pass.

    `others` are the forward states, given to the backward walk when the decay gradient is wanted.
    """
    p, tiling = problem, problem.tiling
    columns = tiling.state.columns
    matrices = (p.terms, p.key_dim, p.value_dim)
    vectors = (p.norm_terms, p.key_dim)
    key_blocks = _cdiv(p.key_dim, tiling.state_keys)
    blocks = key_blocks * _cdiv(p.value_dim, columns) * _cdiv(p.terms, tiling.state_modes)
    blocks += key_blocks if p.normalizer else 0
    programs = p.sequences * p.heads * blocks
    segments = _segments(programs, p.slots // max(p.sequences, 1), tiling.span)
    rate_stride = _rate_stride(log_decay)
    common = p.common() | {
        "SB": p.norm_terms, "SEGMENTS": segments, "FINE": FINE, "REVERSE": reverse,
    }  # fmt: skip

    def new(*lead: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor | None]:
        b = x.new_empty(*lead, *vectors, dtype=torch.float32) if p.normalizer else None
        return x.new_empty(*lead, *matrices, dtype=dtype), b

    def walk(grid: int, states: Pair, start: Pair, last: Pair, sums: Pair) -> None:
        only_sums = sums[0] is not None
        launch(
            state_kernel, grid, x, y, weights, log_decay, shift, *states, *others, *start,
            *last, *sums, grad, p.cu, p.seq_span, p.length, p.spans, rate_stride,
            SP=tiling.modes, SG=tiling.state_modes, BK=tiling.state_keys, BV=columns,
            BL=tiling.state_rows, SUMS=only_sums, TO_END=keep_last,
            HAS_SHIFT=shift is not None, HAS_FIRST=start[0] is not None,
            HAS_LAST=last[0] is not None, DECAY_GRAD=grad is not None and not only_sums,
            PREC=tiling.precision, tile=tiling.state, **common,
        )  # fmt: skip

    weights = x.new_empty(p.slots, p.heads, p.terms, tiling.span, dtype=torch.float32)
    launch(
        weights_kernel, p.slots * p.heads * (tiling.span // tiling.state_rows),
        log_decay, weight, weights, p.table, p.length, p.spans, rate_stride,
        H=p.heads, S=p.terms, SP=tiling.modes, SPAN=tiling.span, BL=tiling.state_rows,
        REVERSE=reverse, HAS_WEIGHT=weight is not None, VARLEN=p.cu is not None, tile=ROWWISE,
    )  # fmt: skip
    grad = None
    if others[0] is not None:
        rows = p.sequences * segments * blocks
        grad = x.new_zeros(rows, p.heads, p.terms, dtype=torch.float32)
    if segments > 1 and carry[0] is None:
        parts = (segments - 1) * FINE
        sums = new(p.sequences, p.heads, parts)
        walk(programs * parts, NOTHING, NOTHING, NOTHING, sums)
        carry = new(p.sequences, p.heads, segments)
        rows, size = p.sequences * p.heads, p.key_dim * p.value_dim
        folds = rows * p.terms * _cdiv(size, FOLD.columns)
        more = rows * p.norm_terms * _cdiv(p.key_dim, FOLD.columns)
        launch(
            carry_kernel, folds + more, *sums, *first, *carry, log_decay, p.cu, p.length,
            rate_stride, folds, BC=FOLD.columns, HAS_FIRST=first[0] is not None, tile=FOLD,
            **common,
        )  # fmt: skip
    states = new(p.slots, p.heads, dtype=x.dtype)
    last = new(p.sequences, p.heads) if keep_last else NOTHING
    walk(programs * segments, states, carry if segments > 1 else first, last, NOTHING)
    return States(*states, *last, grad, carry)


def run_forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    write: Tensor,
    log_decay: Tensor,
    read: Tensor | None,
    G_first: Tensor | None,
    b_first: Tensor | None,
    keep_last: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Pair]:
    """Outputs, raw normaliser, final G and b, what backward may start from. All contiguous."""
    p, tiling = problem, problem.tiling
    states = _states(p, k, v, write, log_decay, (G_first, b_first), keep_last)
    o = torch.empty_like(v)
    den = None
    if p.normalizer:
        den = v.new_empty(v.shape[:-1], dtype=torch.float32)
    columns = tiling.output.columns
    launch(
        output_kernel, p.row_blocks * p.heads * _cdiv(p.value_dim, columns),
        q, k, v, write, read, log_decay, states.G, states.b, o, den, p.table, p.length, p.spans,
        _rate_stride(log_decay), p.eps,
        BV=columns, HAS_READ=read is not None,
        tile=tiling.output, **p.block(),
    )  # fmt: skip
    kept = (states.G, states.b) if p.keeps_states else states.carry
    return o, den, states.G_last, states.b_last, kept


def run_backward(
    problem: Problem,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    write: Tensor,
    log_decay: Tensor,
    read: Tensor | None,
    G_first: Tensor | None,
    b_first: Tensor | None,
    dG_last: Tensor | None,
    db_last: Tensor | None,
    o: Tensor,
    den: Tensor | None,
    decay_grad: bool,
    kept: Pair,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None
]:
    """Gradients to q, k, v, write, read, log_decay `[H, S]`, initial G and b. All contiguous."""
    p, tiling = problem, problem.tiling
    shift = None
    if den is not None:
        scaled, shift = torch.empty_like(do), torch.empty_like(den)
        launch(
            normalizer_kernel, _cdiv(den.numel(), 32),
            o, do, den, scaled, shift, den.numel(), p.eps,
            V=p.value_dim, BV=power_of_two(p.value_dim), BR=32, tile=ROWWISE,
        )  # fmt: skip
        do = scaled
    rate_stride = _rate_stride(log_decay)
    flags = p.block() | {"HAS_READ": read is not None, "DECAY_GRAD": decay_grad}
    row_part = column_part = None
    if decay_grad:
        sizes = (p.row_blocks, p.heads, tiling.modes)
        row_part, column_part = (q.new_zeros(sizes, dtype=torch.float32) for _ in range(2))

    G, b = kept
    if G is None or not p.keeps_states:
        first = (G_first, b_first)
        G, b, *_ = _states(p, k, v, write, log_decay, first, keep_last=False, carry=kept)
    dq, dread = torch.empty_like(q), None if read is None else torch.empty_like(read)
    launch(
        query_kernel, p.row_blocks * p.heads,
        q, k, v, write, read, log_decay, G, b, do, shift, dq, dread, row_part, p.table,
        p.length, p.spans, rate_stride, BV=tiling.query.columns, tile=tiling.query, **flags,
    )  # fmt: skip

    R, rb, dG_first, db_first, grad, _ = _states(
        p, q, do, read, log_decay, (dG_last, db_last), G_first is not None, shift,
        reverse=True, others=(G, b) if decay_grad else NOTHING,
    )  # fmt: skip
    del G, b, kept
    dk, dv, dwrite = torch.empty_like(k), torch.empty_like(v), torch.empty_like(write)
    blocks = _cdiv(p.value_dim, tiling.key.columns)
    # one value block: both at once; several: keys walk over them, values have a program for each
    for keys, values, programs in (
        [(True, True, 1)] if blocks == 1 else [(True, False, 1), (False, True, blocks)]
    ):
        launch(
            key_kernel, p.row_blocks * p.heads * programs,
            q, k, v, write, read, log_decay, R, rb, do, shift, dk, dv, dwrite, column_part,
            p.table, p.length, p.spans, rate_stride, KEYS=keys, VALUES=values,
            BV=tiling.key.columns, tile=tiling.key, **flags,
        )  # fmt: skip
    dlog = None
    if grad is not None and row_part is not None and column_part is not None:
        dlog = grad.sum(0) + (row_part.sum(0) + column_part.sum(0))[:, : p.terms]
    return dq, dk, dv, dwrite, dread, dlog, dG_first, db_first
