"""A run of chunks, loaded: what both passes compute for it."""

import torch
from torch import Tensor

from vort.ops.retention.chunk.problem import Problem
from vort.ops.retention.chunk.states import run_states
from vort.ops.retention.chunk.workspace import Workspace

__all__ = ["Segment", "enter", "flat", "matrices", "spread"]


class Segment:
    """A run of chunks, loaded.

    q, k, v and all matrices are batches [n rows H, C, .]; scores, weights and their product, pairs,
    go by source: [n rows H, C, C] at [i, t], where t reads i. The gates read and write, how
    positions read the states that enter their chunk (reading) and write those that leave it
    (writing) keep their [n, rows, H, C, S]. `batch` is (n, rows, H).
    """

    def __init__(self, problem: Problem, start: int, stop: int) -> None:
        self.problem, self.span = problem, (start, stop)
        self.chunks = problem.layout.chunks[start:stop]
        self.q = flat(self.load("q", problem.q))
        self.k = flat(self.load("k", problem.k))
        self.v = flat(self.load("v", problem.v))
        self.write = self.load("write", problem.write)
        self.batch = self.write.shape[:3]
        power = problem.decays.power
        if problem.read is None:
            self.read = power.new_ones(()).expand(self.write.shape)
        else:
            self.read = self.load("read", problem.read)
        self.arrive = power[1:].transpose(0, 1).contiguous()
        self.lengths = torch.tensor([chunk.length for chunk in self.chunks], device=power.device)
        steps = self.lengths[:, None] - 1 - torch.arange(problem.plan.chunk, device=power.device)
        steps = steps.clamp_min_(0)
        self.steps_to_end = steps[:, None, None, :, None]
        self.leave = power[steps].transpose(1, 2).unsqueeze(1).contiguous()
        self.reading = self.read * self.arrive
        self.writing = self.write * self.leave
        size = problem.plan.chunk
        self.weights = problem.weights.by_source(self.read, self.write)
        self.scores = torch.bmm(self.k, self.q.mT, out=self.take("scores", size))
        self.pairs = torch.mul(self.scores, self.weights, out=self.take("pairs", size))

    def load(self, name: str, x: Tensor) -> Tensor:
        """This segment's part of x [B, T, H, D], in the memory of that name."""
        (start, stop), problem = self.span, self.problem
        shape = (stop - start, problem.layout.rows, x.shape[2], problem.plan.chunk, x.shape[3])
        out = problem.workspace.take(name, *shape)
        return problem.layout.load(x, start, stop, out)

    def take(self, name: str, size: int) -> Tensor:
        """Memory of that name for [n rows H, C, size], contents undefined."""
        return self.problem.workspace.take(name, *self.q.shape[:2], size)

    def store(self, x: Tensor, value: Tensor) -> None:
        """Put this segment's part into x."""
        tokens = value.view(*self.batch, *value.shape[-2:])
        self.problem.layout.store(x, *self.span, tokens)

    def by_chunk(self, x: Tensor) -> Tensor:
        """A batch [n rows H, i, j] chunk by chunk, [n, rows H, i, j]."""
        chunks, rows, heads = self.batch
        return x.view(chunks, rows * heads, *x.shape[1:])

    def pair_sums(self) -> Tensor:
        """What the tokens of its own chunk add to each position's normaliser, [n rows H, C]."""
        if self.problem.normalizer == "decayed":
            return self.pairs.sum(-2)
        return (self.scores * self.problem.decays.seen).sum(-2)

    @property
    def sum_writing(self) -> Tensor:
        """How each position writes b [n rows H, C, S']: plainly when it is undecayed."""
        if self.problem.normalizer == "decayed":
            return flat(self.writing)
        return self.k.new_ones(()).expand(*self.k.shape[:-1], self.problem.sum_terms)

    @property
    def sum_reading(self) -> Tensor:
        """How each position reads b, likewise."""
        if self.problem.normalizer == "decayed":
            return flat(self.reading)
        return self.k.new_ones(()).expand(*self.k.shape[:-1], self.problem.sum_terms)


def enter(
    segment: Segment,
    state: tuple[Tensor, Tensor],
    initial: tuple[Tensor, Tensor],
    final: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys spread over time scales [n rows H, C, S K]; G and b before each chunk and after all."""
    problem, chunks, workspace = segment.problem, segment.chunks, segment.problem.workspace
    shape_G, shape_b = problem.state_shapes(segment.batch[0] + 1, segment.batch[1])
    written = spread(segment.writing, segment.k, workspace, "written")
    G = workspace.take("states", *shape_G)
    G[0] = state[0]
    pair = (segment.by_chunk(written).mT, segment.by_chunk(segment.v))
    run_states(G, *pair, chunks, problem.decays.drop, initial[0], final[0])
    b = workspace.take("sums", *shape_b)
    b[0] = state[1]
    if problem.sum_terms:
        pair = (segment.by_chunk(segment.sum_writing).mT, segment.by_chunk(segment.k))
        run_states(b, *pair, chunks, problem.sum_drop, initial[1], final[1])
    return written, G, b


def spread(weight: Tensor, x: Tensor, workspace: Workspace, name: str) -> Tensor:
    """weight [..., C, S] times x [n rows H, C, D]: [n rows H, C, S D]."""
    batch, chunk, size = x.shape
    terms = weight.shape[-1]
    out = workspace.take(name, batch, chunk, terms, size)
    torch.mul(weight.view(batch, chunk, terms, 1), x.unsqueeze(-2), out=out)
    return out.view(batch, chunk, terms * size)


def flat(x: Tensor) -> Tensor:
    """[n, rows, H, i, j] as one batch of matrices [n rows H, i, j]."""
    return x.flatten(0, 2)


def matrices(states: Tensor, problem: Problem) -> Tensor:
    """[n, rows, H, S, K V] as a batch of [S K, V]."""
    return states.view(-1, problem.terms * problem.key_dim, problem.value_dim)
