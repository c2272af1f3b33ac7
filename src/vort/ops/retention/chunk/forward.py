"""The forward pass, segment by segment."""

import torch
from torch import Tensor

from vort.ops.retention.chunk.problem import Problem
from vort.ops.retention.chunk.segment import Segment, enter, flat, matrices, spread

__all__ = ["run_forward"]


def run_forward(problem: Problem, keep: bool) -> tuple[Tensor, ...]:
    """Output, signed 1 / normaliser, states before each segment (if kept), final G and b."""
    layout, plan = problem.layout, problem.plan
    output = torch.empty_like(problem.v, memory_format=torch.contiguous_format)
    inverse = problem.empty(*problem.v.shape[:3], 1 if problem.sum_terms else 0)
    kept = problem.state_shapes(plan.max_segments if keep else 0, layout.rows)
    kept_G, kept_b = (problem.empty(*shape) for shape in kept)
    initial = problem.initial()
    final = (initial[0].clone(), initial[1].clone())
    state = problem.new_states(layout.rows)
    for index, (start, stop) in enumerate(layout.segments(plan.per_segment)):
        if keep:
            kept_G[index], kept_b[index] = state
        segment = Segment(problem, start, stop)
        _, G, b = enter(segment, state, initial, final)
        state = (G[-1], b[-1])
        value = torch.bmm(segment.pairs.mT, segment.v, out=segment.take("value", problem.value_dim))
        asking = spread(segment.reading, segment.q, problem.workspace, "asking")
        value = value.baddbmm_(asking, matrices(G[:-1], problem))
        if problem.sum_terms:
            total = segment.pair_sums()
            total += (segment.sum_reading * torch.bmm(segment.q, flat(b[:-1]).mT)).sum(-1)
            signed = torch.copysign(1 / (total.abs() + problem.eps), total).unsqueeze(-1)
            segment.store(inverse, signed)
            value *= signed.abs()
        segment.store(output, value)
    problem.workspace.close()
    return output, inverse, kept_G, kept_b, *final
