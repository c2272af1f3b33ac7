"""A run of chunks, loaded: what both passes compute for it."""

import torch
from torch import Tensor

from vort.ops.retention.chunk.problem import Problem, Workspace
from vort.ops.retention.chunk.states import run_states
from vort.ops.retention.chunk.weights import pair_weights

__all__ = ["Segment", "enter", "flat", "matrices", "spread"]


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
        self.pairs = self.scores * self.weights

    def load(self, x: Tensor) -> Tensor:
        """This segment's part of x [B, T, H, D]."""
        return self.problem.layout.load(x, *self.span, self.problem.dtype)

    def store(self, x: Tensor, value: Tensor) -> None:
        """Put this segment's part into x."""
        self.problem.layout.store(x, *self.span, value)

    def pair_sums(self) -> Tensor:
        """What the tokens of its own chunk add to each position's normaliser, [n, rows, H, C]."""
        if self.problem.normalizer == "decayed":
            return self.pairs.sum(-1)
        return (self.scores * self.problem.decays.seen).sum(-1)

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


def enter(
    segment: Segment,
    state: tuple[Tensor, Tensor],
    initial: tuple[Tensor, Tensor],
    final: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys spread over time scales [n rows H, C, S K]; G and b before each chunk and after all."""
    problem, chunks, workspace = segment.problem, segment.chunks, segment.problem.workspace
    written = spread(segment.writing, segment.k, workspace, "written")
    shape = (segment.q.shape[0] + 1, *segment.q.shape[1:3])
    G = workspace.take("states", *shape, problem.terms, problem.key_dim * problem.value_dim)
    G[0] = state[0]
    left, right = written.flatten(1, 2).mT, segment.v.flatten(1, 2)
    run_states(G, left, right, chunks, problem.decays.drop, initial[0], final[0])
    b = workspace.take("sums", *shape, problem.sum_terms, problem.key_dim)
    b[0] = state[1]
    if problem.sum_terms:
        left, right = segment.sum_writing.flatten(1, 2).mT, segment.k.flatten(1, 2)
        run_states(b, left, right, chunks, problem.sum_drop, initial[1], final[1])
    return written, G, b


def spread(weight: Tensor, x: Tensor, workspace: Workspace, name: str) -> Tensor:
    """weight [..., C, S] times x [..., C, D]: [..., C, S D]."""
    out = workspace.take(name, *weight.shape, x.shape[-1])
    torch.mul(weight.unsqueeze(-1), x.unsqueeze(-2), out=out)
    return out.flatten(-2)


def flat(x: Tensor) -> Tensor:
    """[n, rows, H, i, j] as one batch of matrices [n rows H, i, j]."""
    return x.flatten(0, 2)


def matrices(states: Tensor, problem: Problem) -> Tensor:
    """[n, rows, H, S, K V] as a batch of [S K, V]."""
    return states.view(-1, problem.terms * problem.key_dim, problem.value_dim)
