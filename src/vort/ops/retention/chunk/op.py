"""The parallel form as one differentiable function: training on a CPU and anywhere."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from vort.ops.asked import Asked, pick
from vort.ops.custom import Some, Tensors, custom_op, without_autocast
from vort.ops.products import one_by_one
from vort.ops.retention.chunk.layout import DenseLayout, Plan
from vort.ops.retention.chunk.pairs import pairs_backward, pairs_forward, pairs_pay
from vort.ops.retention.chunk.passes import Found, Gradients, run_backward, run_forward
from vort.ops.retention.chunk.piece import Work
from vort.ops.retention.chunk.readers import AskedInputs, Readers
from vort.ops.retention.exact import retention_exact
from vort.ops.retention.inputs import Inputs, b_rows, compute_dtype, count_sequences
from vort.ops.retention.state import RetentionState
from vort.ops.side_by_side import cut, run_side_by_side, threads_here

__all__ = ["AskedInputs", "retention_chunk", "retention_of_asked"]

# Numbers in the spread keys of a call that is worth the way to other threads, measured on two
# cores: with MKL 2,048 tokens of 4 heads; 1,024 are as fast either way, and 512 slower. Where
# products are one thread's, see `vort.ops.products`, 512 are.
LARGE, LARGE_BY_ONE = 1 << 22, 1 << 20


def retention_chunk(inputs: Inputs) -> tuple[Tensor, RetentionState | None]:
    """What `retention` returns, in time and memory linear in T.

    `chunk_size` is 64 unless given; shorter sequences get shorter chunks.

    >>> x = torch.ones(1, 3, 1, 1)
    >>> o, _ = retention_chunk(Inputs(x, x, x, x, torch.zeros(1), normalizer="none"))
    >>> o.flatten().tolist()
    [1.0, 2.0, 3.0]
    """
    per_head = inputs.log_decay.expand(inputs.q.shape[2], inputs.write.shape[-1])
    o, G_last, b_last = _retention(inputs._replace(log_decay=per_head))
    return o, RetentionState(G_last, b_last) if inputs.output_final_state else None


def retention_of_asked(given: AskedInputs) -> Tensor:
    """What `retention` of whole sequences returns at positions asked for, `[rows, H, V]`.

    Numbers and gradients are those of `retention_chunk`, to the bit: others write, and read
    nothing. Where batched products are dear and readers few, pairs are summed instead of states:
    there they are the same but for rounding.
    """
    per_head = given.log_decay.expand(given.k.shape[2], given.write.shape[-1])
    way = _of_pairs if one_by_one(given.k) and pairs_pay(given) else _of_asked
    return way(given._replace(log_decay=per_head))[0]  # type: ignore[no-any-return]


def _asked_work(given: AskedInputs, decay_needs_grad: bool) -> tuple[Work, Readers]:
    options = (given.normalizer, given.include_self, given.eps, False, None, given.tracked)
    inputs = Inputs(*given[:6], None, None, None, None, *options)
    layout = DenseLayout(given.batch, given.length, Plan.of(inputs).chunk, given.k.device)
    readers = Readers(given.places, layout, b_rows(given.normalizer, given.write.shape[-1]))
    dtype = compute_dtype(*given[:3])
    read = None if given.read is None else readers.spread(given.read, dtype)
    inputs = inputs._replace(q=readers.spread(given.q, dtype), read=read)
    return Work(inputs, decay_needs_grad, None, readers), readers


def _asked_forward(given: AskedInputs) -> Tensors:
    with torch.no_grad(), without_autocast(given.k):
        work, readers = _asked_work(given, decay_needs_grad=False)
        found = Found.of(work)
        _for_heads(work, lambda part, heads: run_forward(part, found.of_heads(heads)))
        return readers.gather(found.output, given.q), *found[1:4]


def _asked_backward(given: AskedInputs, kept: Some, grads: Some, needs: Sequence[bool]) -> Tensors:
    with torch.no_grad(), without_autocast(given.k):
        work, readers = _asked_work(given, decay_needs_grad=needs[4])
        do = readers.spread(grads[0], work.dtype)
        inverse, kept_G, kept_b = kept
        G, b = work.new_states(work.sequences)
        found = _gradients(work, Found(do, inverse, kept_G, kept_b, G, b))
        dq, dread = (
            None if like is None else readers.gather(x, like)
            for x, like in ((found.dq, given.q), (found.dread, given.read))
        )
        dlog_decay = found.dlog_decay.to(given.log_decay.dtype)
    return dq, found.dk, found.dv, found.dwrite, dlog_decay, dread


def _pairs_forward(given: AskedInputs) -> Tensors:
    with torch.no_grad(), without_autocast(given.k):
        return pairs_forward(given)


def _pairs_backward(given: AskedInputs, kept: Some, grads: Some, needs: Sequence[bool]) -> Tensors:
    with torch.no_grad(), without_autocast(given.k):
        return pairs_backward(given, kept, grads, needs)


def _asked_plain(given: AskedInputs) -> Tensors:
    """Of all positions; those that are not asked for have queries and reads of 0."""
    asked = Asked(given.places, given.batch, given.length)

    def whole(x: Tensor) -> Tensor:
        out: Tensor = x.new_zeros(asked.batch * asked.length, *x.shape[1:])
        out = out.index_copy(0, asked.places, x[: len(asked.places)])
        return out.view(asked.batch, asked.length, *x.shape[1:])

    q, read = whole(given.q), None if given.read is None else whole(given.read)
    options = (given.normalizer, given.include_self, given.eps)
    inputs = Inputs(q, *given[1:5], read, None, None, None, None, *options)
    return (pick(retention_exact(inputs)[0], asked),)


def _forward(inputs: Inputs) -> Tensors:
    with torch.no_grad(), without_autocast(inputs.q):
        work = Work(inputs, decay_needs_grad=False)
        found = Found.of(work)
        _for_heads(work, lambda part, heads: run_forward(part, found.of_heads(heads)))
    o, *kept, G_last, b_last = found
    if not inputs.output_final_state:
        return o, None, None, *kept
    G_last = G_last.unflatten(-1, (work.key_dim, work.value_dim))
    return o, G_last, b_last if work.b_rows else None, *kept


def _for_heads(work: Work, run: Callable[[Work, slice], None]) -> None:
    """Run the work of all heads, on a CPU in as many parts at once as there are threads."""
    parts = 1
    least = LARGE_BY_ONE if one_by_one(work.inputs.q) else LARGE
    if work.inputs.q.device.type == "cpu" and work.size >= least:
        parts = min(threads_here(), work.heads)
    if parts == 1:
        run(work, slice(None))
        return
    each = cut(work.heads, parts)
    run_side_by_side([partial(_run_part, work, heads, run) for heads in each])


def _run_part(work: Work, heads: slice, run: Callable[[Work, slice], None]) -> None:
    run(work.of_heads(heads), heads)


def _shapes(inputs: Inputs) -> Tensors:
    q, k, v, write, *_ = inputs
    (batch, length, heads, keys), values, num_scales = q.shape, v.shape[3], write.shape[-1]
    rows, sequences = b_rows(inputs.normalizer, num_scales), count_sequences(inputs)
    count = Plan.of(inputs).max_kept if inputs.tracked else 0
    dtype, last = compute_dtype(q, k, v), inputs.output_final_state

    def new(*shape: int) -> Tensor:
        return q.new_empty(shape, dtype=dtype)

    return (
        torch.empty_like(v, memory_format=torch.contiguous_format),
        new(sequences, heads, num_scales, keys, values) if last else None,
        new(sequences, heads, rows, keys) if last and rows else None,
        new(batch, length, heads, 1 if rows else 0),
        new(count, batch, heads, num_scales, keys * values),
        new(count, batch, heads, rows, keys),
    )


def _backward(inputs: Inputs, kept: Tensors, grads: Tensors, needs: Sequence[bool]) -> Tensors:
    inverse, kept_G, kept_b = (x for x in kept if x is not None)
    do, dG_last, db_last = grads
    with torch.no_grad(), without_autocast(inputs.q):
        work = Work(inputs, decay_needs_grad=needs[4])
        do = torch.zeros_like(inputs.v) if do is None else do
        G, b = work.new_states(work.sequences)
        if dG_last is not None:
            G.copy_(dG_last.flatten(-2))
        if db_last is not None:
            b.copy_(db_last)
        found = _gradients(work, Found(do, inverse, kept_G, kept_b, G, b))
        dlog_decay = found.dlog_decay.to(inputs.log_decay.dtype)
        dG = db = None
        if inputs.G is not None:
            dG = found.dG.unflatten(-1, (work.key_dim, work.value_dim)).to(inputs.G.dtype)
        if inputs.b is not None:
            db = found.db.to(inputs.b.dtype)
    return found.dq, found.dk, found.dv, found.dwrite, dlog_decay, found.dread, dG, db


def _gradients(work: Work, given: Found) -> Gradients:
    found = Gradients.of(work)

    def run(part: Work, heads: slice) -> None:
        run_backward(part, given.of_heads(heads), found.of_heads(heads))

    _for_heads(work, run)
    return found


def _plain(inputs: Inputs) -> Tensors:
    o, state = retention_exact(inputs)
    return (o, None, None) if state is None else (o, *state)


_retention = custom_op(
    "vort::retention_chunk",
    Inputs,
    _forward,
    _backward,
    _shapes,
    outputs=("o", "G_last", "b_last", "inverse", "kept_G", "kept_b"),
    shown=3,
    saved=("inverse", "kept_G", "kept_b"),
    gradients=("q", "k", "v", "write", "log_decay", "read", "G", "b"),
    plain=_plain,
)
_of_asked, _of_pairs = (
    custom_op(
        name,
        AskedInputs,
        forward,
        backward,
        None,
        gradients=("q", "k", "v", "write", "log_decay", "read"),
        plain=_asked_plain,
    )
    for name, forward, backward in (
        ("vort::retention_of_asked", _asked_forward, _asked_backward),
        ("vort::retention_of_pairs", _pairs_forward, _pairs_backward),
    )
)
