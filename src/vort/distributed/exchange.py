"""What processes tell each other about a sequence they share, and the gradients of that.

Each is a function of the tensors of all ranks. Its backward goes the other way round: what a rank
was given, it sends gradients for. The sum of what all ranks call their loss is what is
differentiated; wrappers that average gradients over ranks (DDP, FSDP) differentiate its mean.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Chain", "from_last", "states_before", "sum_over_ranks", "with_halo"]

Group = dist.ProcessGroup


class Chain(NamedTuple):
    """The ranks that share sequences, first part first.

    Attributes:
        group: of the ranks.
        joins: for each rank, whether its first token goes on with a sequence of the rank before.
        passes: for each rank, whether it begins no sequence after its first token: what came in
            goes out again.
    """

    group: Group
    joins: Sequence[bool]
    passes: Sequence[bool]

    @property
    def rank(self) -> int:
        """This process's place."""
        return dist.get_rank(self.group)

    @property
    def ranks(self) -> int:
        """How many there are."""
        return dist.get_world_size(self.group)


# Ranks talk outside of compiled graphs.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def with_halo(x: Tensor, size: int, group: Group) -> Tensor:
    """The last `size` positions of the rank before, then x `[B, T, ...]`; the first rank has x."""
    if size == 0 or dist.get_world_size(group) == 1:
        return x
    found: Tensor = _Halo.apply(x, size, group)  # type: ignore[no-untyped-call]
    return found


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: Group) -> Tensor:
        ctx.size, ctx.group = size, group
        before = _shift(x[:, x.shape[1] - size :], group, forward=True)
        return x.view_as(x) if before is None else torch.cat([before, x], 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (d,) = grads
        size, first = ctx.size, dist.get_rank(ctx.group) == 0
        halo = d.new_zeros(d.shape[0], size, *d.shape[2:]) if first else d[:, :size]
        dx = d if first else d[:, size:]
        after = _shift(halo, ctx.group, forward=False)
        if after is not None:
            dx = dx.clone()
            dx[:, dx.shape[1] - size :] += after
        return dx, None, None


def _shift(x: Tensor, group: Group, *, forward: bool) -> Tensor | None:
    """x of the rank before (of the rank after, if not forward); None where there is none."""
    rank, ranks, step = dist.get_rank(group), dist.get_world_size(group), 1 if forward else -1
    x = x.contiguous()
    to, source = rank + step, rank - step
    received = torch.empty_like(x) if 0 <= source < ranks else None
    calls = []
    if 0 <= to < ranks:
        calls.append(dist.P2POp(dist.isend, x, dist.get_global_rank(group, to), group))
    if received is not None:
        peer = dist.get_global_rank(group, source)
        calls.append(dist.P2POp(dist.irecv, received, peer, group))
    for work in dist.batch_isend_irecv(calls) if calls else ():
        work.wait()
    return received


@torch.compiler.disable  # type: ignore[untyped-decorator]
def states_before(
    chain: Chain,
    own: Sequence[Tensor],
    transitions: Sequence[Sequence[Tensor]] | None,
    log_transition: Sequence[Tensor],
) -> list[Tensor]:
    """For each of `own`, the state before this rank's first token.

        before[r + 1] = joins[r + 1] (passes[r] exp(log_transition[r]) before[r] + own[r])

    One gather of all ranks' own states, and one of gradients on the way back, whatever the length.

    Args:
        chain: the ranks.
        own: what this rank's tokens leave of a state that was empty before them.
        transitions: log_transition of every rank, where all can be computed here; None: they are
            gathered along.
        log_transition: for each of `own`, and of a shape that goes with it: the log of what this
            rank's tokens leave of a state before them.
    """
    known = None if transitions is None else [list(t) for t in transitions]
    found = _States.apply(chain, known, len(own), *own, *log_transition)  # type: ignore[no-untyped-call]
    return list(found)


class _States(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, chain: Chain, known: list[list[Tensor]] | None, count: int, *given: Tensor
    ) -> tuple[Tensor, ...]:
        own, logs = given[:count], given[count:]
        sent = own if known is not None else given
        gathered = _gather(sent, chain.group, chain.ranks)
        if known is None:
            known = [row[count:] for row in gathered]
        before = [torch.zeros_like(x) for x in own]
        for rank in range(chain.rank):
            if not chain.joins[rank + 1]:
                before = [torch.zeros_like(x) for x in own]
                continue
            added = gathered[rank][:count]
            if chain.passes[rank]:
                kept = (log.exp() * x for log, x in zip(known[rank], before, strict=True))
                before = [x + y for x, y in zip(kept, added, strict=True)]
            else:
                before = added
        ctx.chain, ctx.count = chain, count
        ctx.shapes = [x.shape for x in logs]
        # Of every rank after this one, and this one's own.
        later = [x for row in known[chain.rank :] for x in row]
        ctx.save_for_backward(*before, *later)
        return tuple(x.clone() for x in before)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        chain, count = ctx.chain, ctx.count
        saved = ctx.saved_tensors
        before, later = saved[:count], saved[count:]
        gathered = _gather(grads, chain.group, chain.ranks)
        down = [torch.zeros_like(x) for x in before]
        for rank in range(chain.ranks - 1, chain.rank, -1):
            if chain.passes[rank]:
                place = (rank - chain.rank) * count
                logs = later[place : place + count]
                down = [log.exp() * x for log, x in zip(logs, down, strict=True)]
            else:
                down = [torch.zeros_like(x) for x in before]
            if chain.joins[rank]:
                down = [x + y for x, y in zip(down, gathered[rank], strict=True)]
            else:
                down = [torch.zeros_like(x) for x in before]
        dlogs: list[Tensor | None] = [None] * count
        for i in range(count):
            if ctx.needs_input_grad[3 + count + i]:
                through = later[i].exp() * before[i] * down[i]
                through = through if chain.passes[chain.rank] else torch.zeros_like(through)
                dlogs[i] = through.sum_to_size(ctx.shapes[i])
        return None, None, None, *down, *dlogs


def _gather(tensors: Sequence[Tensor], group: Group, ranks: int) -> list[list[Tensor]]:
    """The tensors of every rank, by one call."""
    flat = torch.cat([x.reshape(-1) for x in tensors])
    if ranks == 1:
        return [list(tensors)]
    found = flat.new_empty(ranks * flat.numel())
    # Named anew in torch 2.13.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(found, flat, group=group)
    sizes = [x.numel() for x in tensors]
    return [
        [piece.view(x.shape) for piece, x in zip(row.split(sizes), tensors, strict=True)]
        for row in found.view(ranks, -1)
    ]


def sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    """The sum of x of all ranks, on each of them."""
    found: Tensor = _Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return found


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.ranks = dist.get_world_size(group)
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # Every rank's loss is the sum, and every rank starts its backward from the same number.
        return grads[0] * ctx.ranks, None


def from_last(x: Tensor, group: Group) -> Tensor:
    """x of the last rank, on all of them; of the same shape there, and without gradients."""
    x = x.detach().clone(memory_format=torch.contiguous_format)
    ranks = dist.get_world_size(group)
    dist.broadcast(x, dist.get_global_rank(group, ranks - 1), group=group)
    return x
