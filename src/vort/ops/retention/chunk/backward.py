"""The backward pass, segment by segment from the last."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vort.ops.retention.chunk.problem import Problem
from vort.ops.retention.chunk.segment import Segment, enter, flat, matrices, spread
from vort.ops.retention.chunk.states import run_states_backward

__all__ = ["run_backward"]

# A batch of vectors times matrices is slow for rows shorter than this: on a CPU with MKL, 32
# columns take five times as long as 64.
FAST_ROWS = 64


class Gradients:
    """Where the gradients of a problem go; G and b flattened as in `Problem.new_states`."""

    def __init__(self, problem: Problem, final: tuple[Tensor | None, Tensor | None]) -> None:
        self.q, self.k, self.v, self.write = (
            torch.empty_like(x, memory_format=torch.contiguous_format)
            for x in (problem.q, problem.k, problem.v, problem.write)
        )
        self.read = problem.new(0) if problem.read is None else torch.empty_like(self.write)
        self.log_decay = problem.new(problem.heads, problem.terms)
        self.final = problem.new_states(problem.sequences)
        for place, given in zip(self.final, final, strict=True):
            if given is not None:
                place.copy_(given.reshape(place.shape))
        # A sequence with no tokens hands its final gradient straight to its initial state.
        self.initial = (self.final[0].clone(), self.final[1].clone())


def run_backward(
    problem: Problem,
    grad_output: Tensor,
    inverse: Tensor,
    kept: tuple[Tensor, Tensor],
    grad_final: tuple[Tensor | None, Tensor | None],
) -> Gradients:
    """Gradients of everything, from those of the output and the final states."""
    grads = Gradients(problem, grad_final)
    initial = problem.initial()
    carry = problem.new_states(problem.layout.rows)
    segments = problem.layout.segments(problem.plan.per_segment)
    for index in reversed(range(len(segments))):
        segment = Segment(problem, *segments[index])
        state = (kept[0][index], kept[1][index])
        written, G, b = enter(segment, state, initial)
        reading = _reading_backward(segment, grad_output, inverse, G[:-1], b[:-1])
        carry = _writing_backward(segment, reading, written, G[:-1], b[:-1], carry, grads)
    problem.workspace.close()
    return grads


@dataclass
class ReadingGradients:
    """Gradients on the reading side of a segment, all [n rows H, C, .].

    q [K], reading [S], value [V] (of the sum before it is normalised), scores and weights [C] (by
    source), total_read [S'] (of q . b for each row of b).
    """

    q: Tensor
    reading: Tensor
    value: Tensor
    scores: Tensor
    weights: Tensor
    total_read: Tensor


def _reading_backward(
    segment: Segment, grad_output: Tensor, inverse: Tensor, G: Tensor, b: Tensor
) -> ReadingGradients:
    problem, sums = segment.problem, flat(b)
    value = flat(segment.load("value", grad_output))
    signed = flat(segment.load("inverse", inverse))
    if problem.sum_terms:
        value *= signed.abs()
    _, chunk, size = segment.q.shape
    pairs = torch.bmm(segment.v, value.mT, out=segment.take("pair gradients", chunk))
    asked = segment.take("asking", problem.terms * size)
    torch.bmm(value, matrices(G, problem).mT, out=asked)
    reading = value.new_empty(0)
    if problem.reading_needs_grad:
        reading = _by_scale(asked, segment.q, problem.terms)
    q = _over_scales(asked, flat(segment.reading), segment.take("q gradients", size))
    total_read = total = value.new_empty(0)
    if problem.sum_terms:
        # value . output without keeping the output: it is the same sum, taken by source.
        met = torch.mul(segment.pairs, pairs, out=segment.take("met", chunk))
        drawn = met.sum(-2).unsqueeze(-1)
        drawn += torch.mul(segment.q, q, out=segment.take("met", size)).sum(-1, keepdim=True)
        total = drawn.mul_(signed).neg_()
        total_read = total * segment.sum_reading
        q.baddbmm_(total_read, sums)
    if problem.normalizer == "decayed":
        pairs += total.mT
        if problem.reading_needs_grad:
            reading += total * torch.bmm(segment.q, sums.mT)
    scores = torch.mul(pairs, segment.weights, out=segment.take("score gradients", chunk))
    if problem.normalizer == "undecayed":
        scores.addcmul_(total.mT, problem.decays.seen)
    q.baddbmm_(scores.mT, segment.k)
    return ReadingGradients(q, reading, value, scores, pairs.mul_(segment.scores), total_read)


def _writing_backward(
    segment: Segment,
    read: ReadingGradients,
    written: Tensor,
    G: Tensor,
    b: Tensor,
    carry: tuple[Tensor, Tensor],
    grads: Gradients,
) -> tuple[Tensor, Tensor]:
    """Fill in the gradients of a segment; return those of the states before it."""
    problem, chunks, workspace = segment.problem, segment.chunks, segment.problem.workspace
    asking = spread(segment.reading, segment.q, workspace, "asking")
    leaving = workspace.take("leaving", G.shape[0] + 1, *G.shape[1:])
    leaving[-1] = carry[0]
    pair = (segment.by_chunk(asking).mT, segment.by_chunk(read.value))
    drop = problem.decays.drop
    run_states_backward(leaving, *pair, chunks, drop, grads.initial[0], grads.final[0])
    states = matrices(leaving[1:], problem)
    told = torch.bmm(segment.v, states.mT, out=asking)
    writing = _by_scale(told, segment.k, problem.terms)
    k = _over_scales(told, flat(segment.writing), segment.take("k gradients", problem.key_dim))
    k.baddbmm_(read.scores, segment.q)
    v = segment.take("v gradients", problem.value_dim)
    torch.bmm(segment.pairs, read.value, out=v).baddbmm_(written, states)
    if problem.decay_needs_grad:
        grads.log_decay += _aging(G, leaving[1:], segment)

    counting = workspace.take("counting", b.shape[0] + 1, *b.shape[1:])
    counting[-1] = carry[1]
    if problem.sum_terms:
        pair = (segment.by_chunk(read.total_read).mT, segment.by_chunk(segment.q))
        drop = problem.sum_drop
        run_states_backward(counting, *pair, chunks, drop, grads.initial[1], grads.final[1])
        sums = flat(counting[1:])
        k.baddbmm_(segment.sum_writing, sums)
        if problem.normalizer == "decayed":
            writing.baddbmm_(segment.k, sums.mT)
            if problem.decay_needs_grad:
                grads.log_decay += _aging(b, counting[1:], segment)
    _store_gates(segment, read, writing.view(segment.write.shape), grads)
    for place, value in ((grads.q, read.q), (grads.k, k), (grads.v, v)):
        segment.store(place, value)
    return leaving[0], counting[0]


def _store_gates(
    segment: Segment, read: ReadingGradients, writing: Tensor, grads: Gradients
) -> None:
    """Gradients of read, write and log_decay: inside chunks, into them and out of them."""
    problem = segment.problem
    chunk = problem.plan.chunk
    to_read, to_write, to_decay = problem.weights.backward(
        read.weights, segment.read, segment.write, problem.decay_needs_grad
    )
    segment.store(grads.write, to_write + writing * segment.leave)
    if problem.reading_needs_grad:
        reading = read.reading.view(segment.read.shape)
    if to_read is not None:
        segment.store(grads.read, to_read + reading * segment.arrive)
    if to_decay is None:
        return
    since_start = torch.arange(1, chunk + 1, device=writing.device).unsqueeze(-1)
    aged = segment.reading * reading * since_start
    aged += segment.writing * writing * segment.steps_to_end
    grads.log_decay += to_decay
    grads.log_decay += aged.sum((0, 1, 3))


def _by_scale(scales: Tensor, x: Tensor, terms: int) -> Tensor:
    """For each token, its S rows of scales [.., C, S K] times x [.., C, K]: [.., C, S]."""
    batch, chunk, size = x.shape
    rows = scales.view(batch * chunk, terms, size)
    return torch.bmm(x.view(batch * chunk, 1, size), rows.mT).view(batch, chunk, terms)


def _over_scales(scales: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """For each token, the sum of its S rows of scales [.., C, S K], weighted: out [.., C, K].

    The scales are used up.
    """
    batch, chunk, terms = weight.shape
    rows = scales.view(batch * chunk, terms, -1)
    weight = weight.reshape(batch * chunk, 1, terms)
    if rows.shape[-1] >= FAST_ROWS:
        torch.bmm(weight, rows, out=out.view(batch * chunk, 1, -1))
    else:
        torch.sum(rows.mul_(weight.mT), 1, out=out.view(batch * chunk, -1))
    return out


def _aging(entering: Tensor, leaving: Tensor, segment: Segment) -> Tensor:
    """Gradient of log_decay [H, S] through the aging of states across whole chunks."""
    # The states that entered have served: they hold the product.
    met = entering.mul_(leaving).sum(-1)
    length = segment.lengths
    met *= segment.problem.decays.power[length].unsqueeze(1) * length[:, None, None, None]
    return met.sum((0, 1))
