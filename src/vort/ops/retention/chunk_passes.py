"""Forward and backward over chunks, a segment at a time.

Inside a chunk retention is one masked matrix product; between chunks only the states count. A
segment is a run of chunks whose temporaries fit a fixed workspace, so memory beyond inputs and
outputs is that workspace plus one state for each segment. The backward pass computes the states
inside a segment again from the one it starts with: storing them all would take S K V / C numbers
per token, eight times q, k and v together at S = 8, K = V = C = 64.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vort.ops.retention.chunk_layout import Chunk, Layout, Plan, make_layout
from vort.ops.retention.chunk_weights import Decays, pair_weights, pair_weights_backward
from vort.ops.retention.state import compute_dtype, state_terms

__all__ = ["Problem", "run_backward", "run_forward"]


@dataclass
class Problem:
    """Everything a pass is given; log_decay is [H, S]."""

    q: Tensor
    k: Tensor
    v: Tensor
    write: Tensor
    log_decay: Tensor
    read: Tensor | None
    G: Tensor | None
    b: Tensor | None
    cu_seqlens: Tensor | None
    normalizer: str
    include_self: bool
    chunk_size: int
    eps: float

    def __post_init__(self) -> None:
        """Derive sizes, tables and the layout."""
        self.dtype = compute_dtype(self.q, self.k, self.v)
        self.heads, self.key_dim, self.value_dim = *self.q.shape[2:], self.v.shape[3]
        self.terms = self.write.shape[-1]
        self.sum_terms = state_terms(self.normalizer, self.terms)
        packed = self.cu_seqlens is not None
        self.sequences = len(self.cu_seqlens) - 1 if packed else self.q.shape[0]
        self.plan = Plan.of(self.q, self.v, self.write, self.cu_seqlens, self.chunk_size)
        self.decays = Decays.of(self.log_decay.to(self.dtype), self.plan.chunk, self.include_self)

    @cached_property
    def layout(self) -> Layout:
        """Where the chunks are."""
        return make_layout(self.q, self.cu_seqlens, self.plan.chunk)

    @property
    def sum_drop(self) -> Tensor:
        """What b loses over each length [C + 1, H, S']: nothing when it is undecayed."""
        if self.normalizer == "decayed":
            return self.decays.drop
        return torch.zeros_like(self.decays.drop[..., : self.sum_terms])

    def new(self, *shape: int) -> Tensor:
        """Zeros in the dtype of the sums."""
        return torch.zeros(shape, dtype=self.dtype, device=self.q.device)

    def new_states(self, *count: int) -> tuple[Tensor, Tensor]:
        """Zeros for G and b with rows flattened: [..., H, S, K V] and [..., H, S', K]."""
        width = self.key_dim * self.value_dim
        return (
            self.new(*count, self.heads, self.terms, width),
            self.new(*count, self.heads, self.sum_terms, self.key_dim),
        )

    def initial(self) -> tuple[Tensor, Tensor]:
        """The states that the sequences start from, in the same form."""
        G, b = self.new_states(self.sequences)
        if self.G is not None:
            G = self.G.to(self.dtype).flatten(-2)
        if self.b is not None:
            b = self.b.to(self.dtype)
        return G, b


class Segment:
    """A run of chunks, loaded: [n, rows, H, C, .] tensors and the weights between positions."""

    def __init__(self, problem: Problem, start: int, stop: int) -> None:
        self.problem, self.span = problem, (start, stop)
        self.chunks = problem.layout.chunks[start:stop]
        self.q, self.k, self.v = (self.load(x) for x in (problem.q, problem.k, problem.v))
        self.write = self.load(problem.write)
        power = problem.decays.power
        if problem.read is None:
            self.read = power.new_ones(()).expand(self.write.shape)
        else:
            self.read = self.load(problem.read)
        self.arrive = power[1:].transpose(0, 1)
        self.lengths = torch.tensor([chunk.length for chunk in self.chunks], device=power.device)
        steps = self.lengths[:, None] - 1 - torch.arange(problem.plan.chunk, device=power.device)
        steps = steps.clamp_min_(0)
        self.steps_to_end = steps[:, None, None, :, None]
        self.leave = power[steps].transpose(1, 2).unsqueeze(1)
        # How each position reads the state that enters its chunk, and writes the one that leaves.
        self.reading = self.read * self.arrive
        self.writing = self.write * self.leave
        self.weights = pair_weights(self.read, self.write, problem.decays)
        self.scores = self.q @ self.k.mT

    def load(self, x: Tensor) -> Tensor:
        """This segment's part of x [B, T, H, D]."""
        return self.problem.layout.load(x, *self.span, self.problem.dtype)

    def store(self, x: Tensor, value: Tensor) -> None:
        """Put this segment's part into x."""
        self.problem.layout.store(x, *self.span, value)

    @property
    def sum_writing(self) -> Tensor:
        """How each position writes b [n, rows, H, C, S']: plainly when it is undecayed."""
        if self.problem.normalizer == "decayed":
            return self.writing
        return self.k.new_ones(()).expand(*self.k.shape[:-1], self.problem.sum_terms)

    @property
    def sum_reading(self) -> Tensor:
        """How each position reads b, likewise."""
        if self.problem.normalizer == "decayed":
            return self.reading
        return self.k.new_ones(()).expand(*self.k.shape[:-1], self.problem.sum_terms)


def _spread(weight: Tensor, x: Tensor) -> Tensor:
    """weight [..., C, S] times x [..., C, D]: [..., C, S D]."""
    return (weight.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)


def _flat(x: Tensor) -> Tensor:
    """[n, rows, H, i, j] as one batch of matrices [n rows H, i, j]."""
    return x.flatten(0, 2)


def run_states(
    added: Tensor,
    state: Tensor,
    chunks: Sequence[Chunk],
    drop: Tensor,
    initial: Tensor,
    final: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """States before each chunk [n, ...] and the one after, from what each chunk adds [n, ...].

    A chunk that starts a sequence takes its state from `initial`, one that ends a sequence leaves
    it in `final`: nothing crosses over.
    """
    entering = torch.empty_like(added)
    for index, chunk in enumerate(chunks):
        entering[index] = state if chunk.first is None else initial[chunk.first]
        before = entering[index]
        state = torch.addcmul(before, before, drop[chunk.length].unsqueeze(-1))
        state += added[index]
        if final is not None and chunk.last is not None:
            final[chunk.last] = state
    return entering, state


def run_states_backward(
    added: Tensor,
    grad: Tensor,
    chunks: Sequence[Chunk],
    drop: Tensor,
    initial: Tensor,
    final: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of the states after each chunk [n, ...] and of the one before the first.

    `added` is what each chunk's own reading gives to the gradient of the state entering it. The
    gradients of final states come in through `final`, those of initial ones go out to `initial`.
    """
    leaving = torch.empty_like(added)
    for index in reversed(range(len(chunks))):
        chunk = chunks[index]
        leaving[index] = grad if chunk.last is None else final[chunk.last]
        after = leaving[index]
        grad = torch.addcmul(after, after, drop[chunk.length].unsqueeze(-1))
        grad += added[index]
        if chunk.first is not None:
            initial[chunk.first] = grad
    return leaving, grad


def _enter(
    segment: Segment,
    state: tuple[Tensor, Tensor],
    initial: tuple[Tensor, Tensor],
    final: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Keys spread over time scales [n rows H, C, S K]; G and b entering each chunk; those after."""
    problem, chunks = segment.problem, segment.chunks
    written = _flat(_spread(segment.writing, segment.k))
    added = (written.mT @ _flat(segment.v)).view(*segment.q.shape[:3], problem.terms, -1)
    G, G_after = run_states(added, state[0], chunks, problem.decays.drop, initial[0], final[0])
    counted = segment.sum_writing.mT @ segment.k
    b, b_after = run_states(counted, state[1], chunks, problem.sum_drop, initial[1], final[1])
    return written, _matrices(G, problem), b, (G_after, b_after)


def _matrices(states: Tensor, problem: Problem) -> Tensor:
    """[n, rows, H, S, K V] as a batch of [S K, V]."""
    return states.view(-1, problem.terms * problem.key_dim, problem.value_dim)


def run_forward(problem: Problem, keep: bool) -> tuple[Tensor, ...]:
    """Output, signed 1 / normaliser, states before each segment (if kept), final G and b."""
    layout, plan = problem.layout, problem.plan
    output = torch.empty_like(problem.v, memory_format=torch.contiguous_format)
    inverse = problem.new(*problem.v.shape[:3], 1 if problem.sum_terms else 0)
    kept = problem.new_states(plan.max_segments if keep else 0, layout.rows)
    initial = problem.initial()
    final = (initial[0].clone(), initial[1].clone())
    state = problem.new_states(layout.rows)
    for index, (start, stop) in enumerate(layout.segments(plan.per_segment)):
        if keep:
            kept[0][index], kept[1][index] = state
        segment = Segment(problem, start, stop)
        _, G, b, state = _enter(segment, state, initial, final)
        pairs = segment.scores * segment.weights
        value = torch.bmm(_flat(pairs), _flat(segment.v))
        value = value.baddbmm_(_flat(_spread(segment.reading, segment.q)), G)
        value = value.view(segment.v.shape)
        if problem.sum_terms:
            seen = segment.scores * problem.decays.seen
            total = (pairs if problem.normalizer == "decayed" else seen).sum(-1)
            total += (segment.sum_reading * (segment.q @ b.mT)).sum(-1)
            signed = torch.copysign(1 / (total.abs() + problem.eps), total).unsqueeze(-1)
            segment.store(inverse, signed)
            value *= signed.abs()
        segment.store(output, value)
    return output, inverse, *kept, *final


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
        written, G, b, _ = _enter(segment, state, initial)
        reading = _reading_backward(segment, grad_output, inverse, G, b)
        carry = _writing_backward(segment, reading, written, G, b, carry, grads)
    return grads


@dataclass
class ReadingGradients:
    """Gradients on the reading side of a segment.

    q [.., C, K], reading [.., C, S], value [.., C, V] (of the sum before it is normalised),
    scores and weights [.., C, C], total_read [.., C, S'] (of q . b for each row of b).
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
    problem, shape = segment.problem, segment.q.shape
    value = segment.load(grad_output)
    signed = segment.load(inverse)
    if problem.sum_terms:
        value = value * signed.abs()
    pairs = value @ segment.v.mT
    asked = torch.bmm(_flat(value), G.mT)
    reading = _per_token(asked, segment.q.unsqueeze(-1), problem.terms).view(segment.reading.shape)
    q = _per_token(asked, segment.reading.unsqueeze(-2), problem.terms).view(shape)
    total_read = value.new_empty(0)
    scores = 0
    if problem.sum_terms:
        # value . output without keeping the output: it is the same sum, taken by source.
        drawn = (segment.scores * segment.weights * pairs).sum(-1, keepdim=True)
        drawn += (segment.reading * reading).sum(-1, keepdim=True)
        total = -drawn * signed
        total_read = total * segment.sum_reading
        q += total_read @ b
        if problem.normalizer == "decayed":
            pairs += total
            reading += total * (segment.q @ b.mT)
        else:
            scores = total * problem.decays.seen
    scores = scores + pairs * segment.weights
    q += scores @ segment.k
    return ReadingGradients(q, reading, value, scores, pairs * segment.scores, total_read)


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
    problem, chunks = segment.problem, segment.chunks
    asking = _flat(_spread(segment.reading, segment.q))
    added = (asking.mT @ _flat(read.value)).view(*segment.q.shape[:3], problem.terms, -1)
    drop = problem.decays.drop
    args = (grads.initial[0], grads.final[0])
    leaving, G_carry = run_states_backward(added, carry[0], chunks, drop, *args)
    states = _matrices(leaving, problem)
    told = torch.bmm(_flat(segment.v), states.mT)
    writing = _per_token(told, segment.k.unsqueeze(-1), problem.terms).view(segment.writing.shape)
    k = _per_token(told, segment.writing.unsqueeze(-2), problem.terms).view(segment.k.shape)
    k += read.scores.mT @ segment.q
    v = torch.bmm(_flat(segment.scores * segment.weights).mT, _flat(read.value))
    v = v.baddbmm_(written, states).view(segment.v.shape)
    grads.log_decay += _aging(G.view(added.shape), leaving, segment)

    b_carry = carry[1]
    if problem.sum_terms:
        counted = read.total_read.mT @ segment.q
        args = (grads.initial[1], grads.final[1])
        leaving, b_carry = run_states_backward(counted, b_carry, chunks, problem.sum_drop, *args)
        k += segment.sum_writing @ leaving
        if problem.normalizer == "decayed":
            writing += segment.k @ leaving.mT
            grads.log_decay += _aging(b, leaving, segment)
    _store_gates(segment, read, writing, grads)
    for place, value in ((grads.q, read.q), (grads.k, k), (grads.v, v)):
        segment.store(place, value)
    return G_carry, b_carry


def _store_gates(
    segment: Segment, read: ReadingGradients, writing: Tensor, grads: Gradients
) -> None:
    """Gradients of read, write and log_decay: inside chunks, into them and out of them."""
    problem = segment.problem
    to_read, to_write, to_decay = pair_weights_backward(
        read.weights, segment.read, segment.write, problem.decays
    )
    segment.store(grads.write, to_write + writing * segment.leave)
    if problem.read is not None:
        segment.store(grads.read, to_read + read.reading * segment.arrive)
    since_start = torch.arange(1, problem.plan.chunk + 1, device=to_decay.device).unsqueeze(-1)
    aged = segment.reading * read.reading * since_start
    aged += segment.writing * writing * segment.steps_to_end
    grads.log_decay += to_decay + aged.sum((0, 1, 3))


def _per_token(scales: Tensor, weight: Tensor, terms: int) -> Tensor:
    """For each token, scales [.., C, S K] as [S, K] times a column [K, 1] or under a row [1, S]."""
    matrices = scales.view(-1, terms, scales.shape[-1] // terms)
    factor = weight.reshape(matrices.shape[0], *weight.shape[-2:])
    return factor @ matrices if factor.shape[1] == 1 else matrices @ factor


def _aging(entering: Tensor, leaving: Tensor, segment: Segment) -> Tensor:
    """Gradient of log_decay [H, S] through the aging of states across whole chunks."""
    width = entering.shape[-1]
    met = entering.view(-1, 1, width) @ leaving.reshape(-1, width, 1)
    length = segment.lengths
    aged = met.view(entering.shape[:-1]) * segment.problem.decays.power[length].unsqueeze(1)
    return (aged * length[:, None, None, None]).sum((0, 1))
