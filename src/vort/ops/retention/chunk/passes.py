"""Forward piece by piece, and backward piece by piece from the last."""

from typing import NamedTuple

import torch
from torch import Tensor

from vort.ops.products import baddbmm_, bmm, one_by_one
from vort.ops.retention.chunk.piece import (
    Piece,
    Work,
    beside_states,
    enter,
    flat,
    matrices,
    run_states_backward,
    spread,
)

__all__ = ["Found", "Gradients", "run_backward", "run_forward"]

# A batch of vectors times matrices is slow for rows shorter than this: on a CPU with MKL, 32
# columns take five times as long as 64. NumPy's is not.
FAST_ROWS = 64


class Found(NamedTuple):
    """Where the results of a call go.

    output [B, T, H, V], inverse (signed 1 / normaliser) [B, T, H, 0 or 1], states that are kept
    [count, rows, H, ...], none unless tracked, and final states [N, H, ...] as in `new_states`.
    """

    output: Tensor
    inverse: Tensor
    kept_G: Tensor  # noqa: N815
    kept_b: Tensor
    G: Tensor
    b: Tensor

    @staticmethod
    def of(work: Work) -> "Found":
        """Memory for them all, contents undefined."""
        v, count = work.inputs.v, work.plan.max_kept if work.inputs.tracked else 0
        # Of readers in their slots, [n, rows, H, R, V].
        lead = v.shape[:3] if work.readers is None else work.inputs.q.shape[:-1]
        dtype = v.dtype if work.readers is None else work.dtype
        output = v.new_empty(*lead, work.value_dim, dtype=dtype)
        inverse = work.empty(*lead, 1 if work.b_rows else 0)
        kept_G, kept_b = work.empty_states(count, work.layout.rows)
        return Found(output, inverse, kept_G, kept_b, *work.empty_states(work.sequences))

    def of_heads(self, heads: slice) -> "Found":
        """The places of some heads."""
        output, inverse, kept_G, kept_b = (x[:, :, heads] for x in self[:4])
        return Found(output, inverse, kept_G, kept_b, self.G[:, heads], self.b[:, heads])


def run_forward(work: Work, found: Found) -> None:
    """Fill in the results of a call."""
    layout, initial, state = work.layout, work.initial(), work.new_states(work.layout.rows)
    final = (found.G.copy_(initial[0]), found.b.copy_(initial[1]))
    # Kept states that lie together are made where they are kept.
    in_place = work.inputs.tracked and work.plan.kept_every == 1 and _lie_together(work)
    for start, stop in layout.pieces(work.per_piece):
        piece = Piece(work, start, stop)
        place = found.kept_G[start : stop + 1] if in_place else None
        entered = enter(piece, state, initial, final, place)
        if work.inputs.tracked:
            _keep(work, found.kept_b, start, entered.b)
            if not in_place:
                _keep(work, found.kept_G, start, entered.G)
        state = entered.last
        value = bmm(piece.pairs.mT, piece.v, out=piece.take_read("value", work.value_dim))
        asking = spread(piece.reading, piece.q, work.workspace, "asking")
        for states, part, asked in beside_states(entered.G, work, value, asking):
            baddbmm_(part, asked, states)
        if work.b_rows:
            total = piece.pair_sums()
            total += (piece.for_b(piece.reading) * bmm(piece.q, flat(entered.b).mT)).sum(-1)
            signed = torch.copysign(1 / (total.abs() + work.inputs.eps), total).unsqueeze(-1)
            piece.store_read(found.inverse, signed)
            value *= signed.abs()
        piece.store_read(found.output, value)
    work.workspace.close()


def _keep(work: Work, place: Tensor, start: int, states: Tensor) -> None:
    """Keep, of the states before chunks start.., those that the plan does."""
    each = work.plan.kept_every
    kept = states[::each]
    place[start // each : start // each + len(kept)] = kept


def _lie_together(work: Work) -> bool:
    """Whether a chunk's state [rows, H, ...] is one block among those that are kept."""
    return work.part is None or work.layout.rows == 1


class Gradients(NamedTuple):
    """Where the gradients of a call go, in shapes as in `Found`; dread is empty without `read`."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dwrite: Tensor
    dread: Tensor
    dlog_decay: Tensor
    dG: Tensor  # noqa: N815
    db: Tensor

    @staticmethod
    def of(work: Work) -> "Gradients":
        """Memory for them all, contents undefined but for dlog_decay, which starts at 0."""
        dq, dk, dv, dwrite = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in work.inputs[:4]
        )
        read = work.inputs.read
        dread = work.empty(1, 1, work.heads, 0)
        if read is not None:
            like = dwrite if work.readers is None else read
            dread = torch.empty_like(like, memory_format=torch.contiguous_format)
        dlog_decay = work.new(work.heads, work.num_scales)
        return Gradients(dq, dk, dv, dwrite, dread, dlog_decay, *work.empty_states(work.sequences))

    def of_heads(self, heads: slice) -> "Gradients":
        """The places of some heads."""
        dq, dk, dv, dwrite, dread = (x[:, :, heads] for x in self[:5])
        dlog_decay, dG, db = self.dlog_decay[heads], self.dG[:, heads], self.db[:, heads]
        return Gradients(dq, dk, dv, dwrite, dread, dlog_decay, dG, db)


def run_backward(work: Work, given: Found, grads: Gradients) -> None:
    """Fill in the gradients of everything.

    given: what the forward pass found, with the gradients of output and final states in their
    places.
    """
    final, initial = (given.G, given.b), work.initial()
    # A sequence with no tokens hands its final gradient straight to its initial state.
    grads.dG.copy_(given.G)
    grads.db.copy_(given.b)
    carry = work.new_states(work.layout.rows)
    for start, stop in reversed(work.layout.pieces(work.per_piece)):
        piece = Piece(work, start, stop)
        if work.plan.kept_every == 1:
            written = spread(piece.writing, piece.k, work.workspace, "written")
            G, b = given.kept_G[start:stop], given.kept_b[start:stop].contiguous()
            if not _lie_together(work):
                G = G.contiguous()
        else:
            index = start // work.plan.per_piece
            state = given.kept_G[index], given.kept_b[index]
            written, G, b, _ = enter(piece, state, initial)
        reading = _reading_backward(piece, given.output, given.inverse, G, b)
        carry = _writing_backward(piece, reading, written, G, b, carry, final, grads)
    work.workspace.close()


class ReadingGradients(NamedTuple):
    """Gradients on the reading side of a piece, by reader [n rows H, R, .] or by source.

    dq [K], dreading [S], dvalue [V] (of the sum before it is normalised), dscores and dweights (by
    source), db_reading (of q . b for each row of b).
    """

    dq: Tensor
    dreading: Tensor
    dvalue: Tensor
    dscores: Tensor
    dweights: Tensor
    db_reading: Tensor


def _reading_backward(
    piece: Piece, do: Tensor, inverse: Tensor, G: Tensor, b: Tensor
) -> ReadingGradients:
    work, sums = piece.work, flat(b)
    dvalue = flat(piece.load_read("value", do))
    signed = flat(piece.load_read("inverse", inverse))
    if work.b_rows:
        dvalue = torch.mul(dvalue, signed.abs(), out=piece.take_read("value", work.value_dim))
    _, readers, size = piece.q.shape
    dpairs = bmm(piece.v, dvalue.mT, out=piece.take("pair gradients", readers))
    asked = piece.take_read("asking", work.num_scales * size)
    for states, part, given in beside_states(G, work, asked, dvalue):
        bmm(given, states.mT, out=part)
    dreading = dvalue.new_empty(0)
    if work.reading_needs_grad:
        dreading = _by_scale(asked, piece.q, work.num_scales)
    dq = _over_scales(asked, flat(piece.reading), piece.take_read("q gradients", size))
    db_reading = dtotal = dvalue.new_empty(0)
    if work.b_rows:
        # dvalue . output without keeping the output: it is the same sum, taken by source.
        met = torch.mul(piece.pairs, dpairs, out=piece.take("met", readers))
        drawn = piece.over_sources(met).unsqueeze(-1)
        drawn += torch.mul(piece.q, dq, out=piece.take_read("met", size)).sum(-1, keepdim=True)
        dtotal = drawn.mul_(signed).neg_()
        db_reading = dtotal * piece.for_b(piece.reading)
        baddbmm_(dq, db_reading, sums)
    if work.normalizer == "decayed":
        dpairs += dtotal.mT
        if work.reading_needs_grad:
            dreading += dtotal * bmm(piece.q, sums.mT)
    dscores = torch.mul(dpairs, piece.weights, out=piece.take("score gradients", readers))
    if work.normalizer == "undecayed":
        dscores.addcmul_(dtotal.mT, piece.seen)
    baddbmm_(dq, dscores.mT, piece.k)
    dweights = dpairs.mul_(piece.scores)
    return ReadingGradients(dq, dreading, dvalue, dscores, dweights, db_reading)


def _writing_backward(
    piece: Piece,
    read: ReadingGradients,
    written: Tensor,
    G: Tensor,
    b: Tensor,
    carry: tuple[Tensor, Tensor],
    final: tuple[Tensor, Tensor],
    grads: Gradients,
) -> tuple[Tensor, Tensor]:
    """Fill in the gradients of a piece; return those of the states before it."""
    work, chunks, workspace = piece.work, piece.chunks, piece.work.workspace
    asking = spread(piece.reading, piece.q, workspace, "asking")
    leaving = workspace.take("leaving", G.shape[0] + 1, *G.shape[1:])
    leaving[-1] = carry[0]
    pair = (piece.by_chunk(asking).mT, piece.by_chunk(read.dvalue))
    small = work.is_small(carry[0])
    run_states_backward(leaving, *pair, chunks, work.decays.drop, small, grads.dG, final[0])
    states = matrices(leaving[1:], work)
    told = piece.take("asking", work.num_scales * work.key_dim)  # the asking is done
    bmm(piece.v, states.mT, out=told)
    dwriting = _by_scale(told, piece.k, work.num_scales)
    dk = _over_scales(told, flat(piece.writing), piece.take("k gradients", work.key_dim))
    baddbmm_(dk, read.dscores, piece.q)
    dv = piece.take("v gradients", work.value_dim)
    baddbmm_(bmm(piece.pairs, read.dvalue, out=dv), written, states)
    if work.decay_needs_grad:
        grads.dlog_decay.add_(_aging(G, leaving[1:], piece))

    counting = workspace.take("counting", b.shape[0] + 1, *b.shape[1:])
    counting[-1] = carry[1]
    if work.b_rows:
        given = (read.db_reading, piece.q)
        if piece.offset is not None and work.b_rows == 1:
            # A product with a single row is another function's, whose sums know no shorter order.
            given = (piece.whole(given[0]), piece.whole(given[1]))
        pair = (piece.by_chunk(given[0]).mT, piece.by_chunk(given[1]))
        small = work.is_small(carry[1])
        run_states_backward(counting, *pair, chunks, work.b_drop, small, grads.db, final[1])
        sums = flat(counting[1:])
        baddbmm_(dk, piece.for_b(piece.writing), sums)
        if work.normalizer == "decayed":
            baddbmm_(dwriting, piece.k, sums.mT)
            if work.decay_needs_grad:
                grads.dlog_decay.add_(_aging(b, counting[1:], piece))
    _store_gates(piece, read, dwriting.view(piece.write.shape), grads)
    piece.store_read(grads.dq, read.dq)
    piece.store(grads.dk, dk)
    piece.store(grads.dv, dv)
    return leaving[0], counting[0]


def _store_gates(piece: Piece, read: ReadingGradients, dwriting: Tensor, grads: Gradients) -> None:
    """Gradients of read, write and log_decay: inside chunks, into them and out of them."""
    work = piece.work
    dread, dwrite, dlog_decay = piece.weights_backward(read.dweights)
    piece.store(grads.dwrite, dwrite + dwriting * piece.leave)
    if work.reading_needs_grad:
        dreading = read.dreading.view(piece.read.shape)
    if dread is not None:
        piece.store_read(grads.dread, dread + dreading * piece.arrive)
    if dlog_decay is None:
        return
    if piece.offset is None:
        since_start = torch.arange(1, work.plan.chunk + 1, device=dwriting.device).unsqueeze(-1)
        aged = piece.reading * dreading * since_start
    else:
        since_start = (piece.offset + 1)[:, :, None, :, None]
        aged = piece.at_offsets(piece.reading * dreading * since_start)
    aged += piece.writing * dwriting * piece.steps_to_end
    grads.dlog_decay.add_(dlog_decay)
    grads.dlog_decay.add_(work.sum_heads(aged, (0, 1, 3)))


def _by_scale(rows: Tensor, x: Tensor, num_scales: int) -> Tensor:
    """For each token, its S rows [.., C, S K] times x [.., C, K]: [.., C, S]."""
    batch, chunk, size = x.shape
    rows = rows.view(batch * chunk, num_scales, size)
    return bmm(x.view(batch * chunk, 1, size), rows.mT).view(batch, chunk, num_scales)


def _over_scales(rows: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """For each token, the weighted sum of its S rows [.., C, S K]: out [.., C, K].

    The rows are used up.
    """
    batch, chunk, num_scales = weight.shape
    rows = rows.view(batch * chunk, num_scales, -1)
    weight = weight.reshape(batch * chunk, 1, num_scales)
    if rows.shape[-1] >= FAST_ROWS or one_by_one(rows):
        bmm(weight, rows, out=out.view(batch * chunk, 1, -1))
    else:
        torch.sum(rows.mul_(weight.mT), 1, out=out.view(batch * chunk, -1))
    return out


def _aging(entering: Tensor, leaving: Tensor, piece: Piece) -> Tensor:
    """Gradient of log_decay [H, S] through the aging of states across whole chunks."""
    out = piece.work.workspace.take("aging", *entering.shape)
    met = torch.mul(entering, leaving, out=out).sum(-1)
    length = piece.lengths
    met *= piece.work.decays.power[length].unsqueeze(1) * length[:, None, None, None]
    return piece.work.sum_heads(met, (0, 1))
