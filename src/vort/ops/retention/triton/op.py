"""The kernels' launches in order, and both passes as one differentiable function.

Forward: states, outputs. Backward: states both ways, gradients.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vort.ops.custom import Tensors, custom_op
from vort.ops.gpu.launcher import Tile, dense, launch, power_of_two
from vort.ops.retention.inputs import Inputs, b_rows, count_sequences
from vort.ops.retention.state import RetentionState

from .backward import key_kernel, lean_query_kernel, normalizer_kernel, query_kernel
from .forward import output_kernel
from .pairs import pairs_pay, retention_pairs
from .spans import Spans, cdiv, rate_stride
from .states import carry_kernel, state_kernel, weights_kernel

__all__ = ["retention_op", "retention_triton"]

# Programs of the walk over states for a large GPU: four run at once on each of 132
# multiprocessors, and as many again take the place of those that end early (b costs less than G,
# and fast scales less than slow ones).
RESIDENT = 1050
# Segments cost a second pass and run closer together: fewer than this gain nothing, nor do they
# where this many programs walk over fewer tokens than these.
FEWEST_SEGMENTS = 5
MANY_PROGRAMS = 100
FEW_TOKENS = 16_384
# Parts of a segment in the first pass, where programs differ in how far they look back.
FINE = 4
# Values of a head up to which the queries' kernel has room for normalizer_kernel's work too.
NORMALIZED_BY_QUERIES = 64
ROWWISE = Tile(columns=0, warps=4, stages=1)
FOLD = Tile(columns=256, warps=1, stages=1)

# G and b of the same states; None where there are none.
Pair = tuple[Tensor | None, Tensor | None]
NOTHING: Pair = (None, None)


def retention_triton(inputs: Inputs) -> tuple[Tensor, RetentionState | None]:
    """What `retention` returns, from fused GPU kernels, forward and backward.

    q, k and v share one dtype, bfloat16 or float32 (products in full float32 then); sums and states
    are float32. K, V in 1..256, S in 1..32 (1..256 where few places are asked for), any T.
    `chunk_size`, the tokens between stored states (a span), is chosen by shape unless given. Scales
    sorted from slow to fast cost least: fast ones need no state far into a span.
    """
    q, k, v, write, *_ = inputs
    if q.dtype not in (torch.bfloat16, torch.float32) or not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            "q, k and v must share one dtype, bfloat16 or float32, "
            f"got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if max(q.shape[-1], v.shape[-1]) > 256:
        raise ValueError(f"K and V must be at most 256, got {q.shape[-1]} and {v.shape[-1]}")
    if pairs_pay(inputs):
        return retention_pairs(inputs), None
    if write.shape[-1] > 32:
        raise ValueError(f"S must be at most 32, got {write.shape[-1]}")
    G, b = (None if x is None else x.float() for x in (inputs.G, inputs.b))
    o, G_last, b_last = retention_op(inputs._replace(G=G, b=b))
    return o, RetentionState(G_last, b_last) if inputs.output_final_state else None


def _segments(programs: int, spans: int, span: int) -> int:
    """How many a sequence is cut into, so that `programs` walks fill the GPU; 1: not at all."""
    if programs >= MANY_PROGRAMS and spans * span < FEW_TOKENS:
        return 1
    segments = min(RESIDENT // max(programs, 1), spans // 2)
    return segments if segments >= FEWEST_SEGMENTS else 1


class States(NamedTuple):
    """G (dtype of the inputs) and b (float32) at every span, and what else a walk leaves.

    The last states if asked for, the gradient to log_decay, and what each segment started from,
    for a later walk over the same tokens; None where there is nothing.
    """

    G: Tensor
    b: Tensor | None
    G_last: Tensor | None
    b_last: Tensor | None
    dlog_decay: Tensor | None
    carry: Pair


def _states(
    p: Spans,
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
    tiling, columns = p.tiling, p.tiling.state.columns
    matrices = (p.num_scales, p.key_dim, p.value_dim)
    vectors = (p.b_rows, p.key_dim)
    key_blocks = cdiv(p.key_dim, tiling.state_keys)
    blocks = key_blocks * cdiv(p.value_dim, columns) * cdiv(p.num_scales, tiling.state_scales)
    blocks += key_blocks if p.normalizer else 0
    programs = p.sequences * p.heads * blocks
    segments = _segments(programs, p.slots // max(p.sequences, 1), tiling.span)
    rate_h = rate_stride(log_decay)
    common = p.common() | {
        "SB": p.b_rows, "SEGMENTS": segments, "FINE": FINE, "REVERSE": reverse,
    }  # fmt: skip

    def new(*lead: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor | None]:
        b = x.new_empty(*lead, *vectors, dtype=torch.float32) if p.normalizer else None
        return x.new_empty(*lead, *matrices, dtype=dtype), b

    def walk(grid: int, states: Pair, start: Pair, last: Pair, sums: Pair) -> None:
        only_sums = sums[0] is not None
        launch(
            state_kernel, grid, x, y, weights, log_decay, shift, *states, *others, *start,
            *last, *sums, grad, p.cu, p.seq_span, p.length, p.spans, rate_h,
            SP=tiling.scales, SG=tiling.state_scales, BK=tiling.state_keys, BV=columns,
            BL=tiling.state_rows, SUMS=only_sums, TO_END=keep_last,
            HAS_SHIFT=shift is not None, HAS_FIRST=start[0] is not None,
            HAS_LAST=last[0] is not None, DECAY_GRAD=grad is not None and not only_sums,
            PREC=tiling.precision, tile=tiling.state, **common,
        )  # fmt: skip

    weights = x.new_empty(p.slots, p.heads, p.num_scales, tiling.span, dtype=torch.float32)
    launch(
        weights_kernel, p.slots * p.heads * (tiling.span // tiling.state_rows),
        log_decay, weight, weights, p.table, p.length, p.spans, rate_h,
        H=p.heads, S=p.num_scales, SP=tiling.scales, SPAN=tiling.span, BL=tiling.state_rows,
        REVERSE=reverse, HAS_WEIGHT=weight is not None, VARLEN=p.cu is not None, tile=ROWWISE,
    )  # fmt: skip
    grad = None
    if others[0] is not None:
        rows = p.sequences * segments * blocks
        grad = x.new_zeros(rows, p.heads, p.num_scales, dtype=torch.float32)
    if segments > 1 and carry[0] is None:
        parts = (segments - 1) * FINE
        sums = new(p.sequences, p.heads, parts)
        walk(programs * parts, NOTHING, NOTHING, NOTHING, sums)
        carry = new(p.sequences, p.heads, segments)
        rows, size = p.sequences * p.heads, p.key_dim * p.value_dim
        folds = rows * p.num_scales * cdiv(size, FOLD.columns)
        more = rows * p.b_rows * cdiv(p.key_dim, FOLD.columns)
        launch(
            carry_kernel, folds + more, *sums, *first, *carry, log_decay, p.cu, p.length,
            rate_h, folds, BC=FOLD.columns, HAS_FIRST=first[0] is not None, tile=FOLD,
            **common,
        )  # fmt: skip
    states = new(p.slots, p.heads, dtype=x.dtype)
    last = new(p.sequences, p.heads) if keep_last else NOTHING
    walk(programs * segments, states, carry if segments > 1 else first, last, NOTHING)
    return States(*states, *last, grad, carry)


def _dense(inputs: Inputs) -> Inputs:
    return Inputs._make((*map(dense, inputs[:8]), *inputs[8:]))


def _keeps_states(p: Spans, inputs: Inputs) -> bool:
    """Whether backward finds the states of forward: too if few places are asked for.

    That is a model's last layer, whose states are there alone, and not for long.
    """
    return p.keeps_states or inputs.asked is not None


def _forward(inputs: Inputs) -> Tensors:
    """Outputs, final G and b, raw normaliser; then what backward may start from."""
    q, k, v, write, log_decay, read, G, b, *_ = _dense(inputs)
    p = Spans.of(inputs)
    states = _states(p, k, v, write, log_decay, (G, b), inputs.output_final_state)
    o = torch.empty_like(v)
    den = v.new_empty(v.shape[:-1], dtype=torch.float32) if p.normalizer else None
    columns, wanted = p.tiling.output.columns, p.wanted(inputs.asked)
    launch(
        output_kernel, p.row_blocks * p.heads * cdiv(p.value_dim, columns),
        q, k, v, write, read, log_decay, states.G, states.b, o, den, p.table, wanted, p.length,
        p.spans, rate_stride(log_decay), inputs.eps,
        BV=columns, HAS_READ=read is not None,
        tile=p.tiling.output, **p.block(),
    )  # fmt: skip
    kept = (states.G, states.b) if _keeps_states(p, inputs) else states.carry
    return o, states.G_last, states.b_last, den, *kept, wanted


def _shapes(inputs: Inputs) -> Tensors:
    q, _, v, write, *_ = inputs
    normalizer, num_scales = inputs.normalizer, write.shape[-1]
    lead, key_dim = (count_sequences(inputs), q.shape[2]), q.shape[3]
    G_last = b_last = den = None
    if normalizer != "none":
        den = v.new_empty(v.shape[:-1], dtype=torch.float32)
    if inputs.output_final_state:
        G_last = q.new_empty(*lead, num_scales, key_dim, v.shape[3], dtype=torch.float32)
        if den is not None:
            rows = b_rows(normalizer, num_scales)
            b_last = q.new_empty(*lead, rows, key_dim, dtype=torch.float32)
    return torch.empty_like(v, memory_format=torch.contiguous_format), G_last, b_last, den


def _backward(inputs: Inputs, kept: Tensors, grads: Tensors, needs: Sequence[bool]) -> Tensors:
    """Gradients to q, k, v, write, log_decay, read, initial G and b; None where absent."""
    o, den, *found = kept
    do, dG_last, db_last = (dense(x) for x in grads)
    inputs = _dense(inputs)
    q, k, v, write, log_decay, read, G_first, b_first, *_ = inputs
    p, decay_grad, rate_h = Spans.of(inputs), needs[4], rate_stride(log_decay)
    tiling = p.tiling
    do = torch.zeros_like(v) if do is None else do
    scaled = shift = by_span = None
    if den is not None:
        scaled, shift = torch.empty_like(do), torch.empty_like(den)
        by_span = den.new_empty(p.slots, p.heads, tiling.span)
        if p.value_dim > NORMALIZED_BY_QUERIES:
            launch(
                normalizer_kernel, cdiv(den.numel(), 32),
                o, do, den, scaled, shift, den.numel(), inputs.eps,
                V=p.value_dim, BV=power_of_two(p.value_dim), BR=32, tile=ROWWISE,
            )  # fmt: skip
            do, scaled = scaled, None
    flags = p.block() | {"HAS_READ": read is not None, "DECAY_GRAD": decay_grad}
    row_part = column_part = None
    if decay_grad:
        sizes = (p.row_blocks, p.heads, tiling.scales)
        row_part, column_part = (q.new_zeros(sizes, dtype=torch.float32) for _ in range(2))

    G, b, wanted = found or (*NOTHING, p.wanted(inputs.asked))
    if G is None or not _keeps_states(p, inputs):
        first, carry = (G_first, b_first), (G, b)
        G, b, *_ = _states(p, k, v, write, log_decay, first, keep_last=False, carry=carry)
    dq, dread = torch.empty_like(q), None if read is None else torch.empty_like(read)
    parts, tile = tiling.query_form(decay_grad)
    launch(
        lean_query_kernel if parts else query_kernel, p.row_blocks * p.heads,
        q, k, v, write, read, log_decay, G, b, o if scaled is not None else None, do, den, scaled,
        shift, by_span, dq, dread, row_part, p.table, wanted, p.length, p.spans, rate_h,
        inputs.eps, BV=tiling.query.columns, tile=tile, **flags,
        **({"WHOLE": p.whole, "PARTS": parts} if parts else {}),
    )  # fmt: skip
    do = do if scaled is None else scaled

    R, rb, dG, db, dlog_spans, _ = _states(
        p, q, do, read, log_decay, _both(p, q, dG_last, db_last), G_first is not None, shift,
        reverse=True, others=(G, b) if decay_grad else NOTHING,
    )  # fmt: skip
    del G, b, found, kept
    dk, dv, dwrite = torch.empty_like(k), torch.empty_like(v), torch.empty_like(write)
    blocks = cdiv(p.value_dim, tiling.key.columns)
    # one value block: both at once; several: keys walk over them, values have a program each
    for keys, values, programs in (
        [(True, True, 1)] if blocks == 1 else [(True, False, 1), (False, True, blocks)]
    ):
        launch(
            key_kernel, p.row_blocks * p.heads * programs,
            q, k, v, write, read, log_decay, R, rb, do, by_span, dk, dv, dwrite, column_part,
            p.table, wanted, p.length, p.spans, rate_h, KEYS=keys, VALUES=values,
            BV=tiling.key.columns, tile=tiling.key, **flags,
        )  # fmt: skip
    dlog_decay = None
    if dlog_spans is not None and row_part is not None and column_part is not None:
        inside = (row_part.sum(0) + column_part.sum(0))[:, : p.num_scales]
        dlog_decay = dlog_spans.sum(0) + inside
        dlog_decay = dlog_decay.sum(0) if log_decay.dim() == 1 else dlog_decay
        dlog_decay = dlog_decay.to(log_decay.dtype)
    return dq, dk, dv, dwrite, dlog_decay, dread, dG, db


def _both(p: Spans, like: Tensor, G: Tensor | None, b: Tensor | None) -> Pair:
    """Gradients of the final states: none, or both where the loss took only one of them."""
    if G is None and b is None:
        return NOTHING
    lead = (p.sequences, p.heads)
    if G is None:
        G = like.new_zeros(*lead, p.num_scales, p.key_dim, p.value_dim, dtype=torch.float32)
    if b is None and p.normalizer:
        b = like.new_zeros(*lead, p.b_rows, p.key_dim, dtype=torch.float32)
    return G, b


retention_op = custom_op(
    "vort::retention_forward",
    Inputs,
    _forward,
    _backward,
    _shapes,
    outputs=("o", "G_last", "b_last", "den"),
    shown=3,
    saved=("o", "den"),
    gradients=("q", "k", "v", "write", "log_decay", "read", "G", "b"),
)
