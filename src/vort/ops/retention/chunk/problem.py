"""What the passes are given, with the sizes and tables that follow from it."""

import math
import threading
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vort.ops.retention.chunk.layout import WORKSPACE, Layout, Plan, make_layout
from vort.ops.retention.chunk.weights import Decays
from vort.ops.retention.state import compute_dtype, state_terms

__all__ = ["Problem", "Workspace"]


class Workspace:
    """Large temporaries by name, written over from segment to segment.

    Fresh pages cost a CPU more than the sums that fill them, so there the buffers also outlive the
    call: one set for each thread, no larger than a few workspaces.
    """

    _of_thread = threading.local()

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        if like.device.type == "cpu":
            self.buffers = self._of_thread.__dict__.setdefault("buffers", {})
        if _fills_memory():
            for buffer in self.buffers.values():
                buffer.fill_(math.nan)  # as torch.empty would, so that a missed write shows

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor of this shape, contents undefined; it overwrites the last one of its name."""
        size, key = math.prod(shape), (name, self.like.dtype)
        buffer = self.buffers.get(key)
        if buffer is None or buffer.numel() < size:
            buffer = self.buffers[key] = self.like.new_empty(size)
        return buffer[:size].view(shape)

    def close(self) -> None:
        """Let go of what is too large to keep."""
        for key in [key for key, x in self.buffers.items() if x.numel() > 2 * WORKSPACE["cpu"]]:
            del self.buffers[key]


def _fills_memory() -> bool:
    """Whether torch.empty comes back filled with NaN."""
    fills = bool(getattr(torch.utils.deterministic, "fill_uninitialized_memory", False))
    return fills and torch.are_deterministic_algorithms_enabled()


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
    decay_needs_grad: bool = True

    def __post_init__(self) -> None:
        """Derive sizes, tables and the layout."""
        self.dtype = compute_dtype(self.q, self.k, self.v)
        self.heads, self.key_dim, self.value_dim = *self.q.shape[2:], self.v.shape[3]
        self.terms = self.write.shape[-1]
        self.sum_terms = state_terms(self.normalizer, self.terms)
        cu_seqlens = self.cu_seqlens
        self.sequences = self.q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self.plan = Plan.of(self.q, self.v, self.write, self.cu_seqlens, self.chunk_size)
        # Tables are small for decays that all heads share: [S] comes expanded, with stride 0.
        shared = self.log_decay.stride(0) == 0
        rates = self.log_decay[:1] if shared else self.log_decay
        self.decays = Decays.of(rates.to(self.dtype), self.plan.chunk, self.include_self)
        self.workspace = Workspace(self.decays.power)

    @property
    def reading_needs_grad(self) -> bool:
        """Whether anyone asks how positions read the states: `read`, or the decays."""
        return self.read is not None or self.decay_needs_grad

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

    def empty(self, *shape: int) -> Tensor:
        """Like `new`, contents undefined."""
        return torch.empty(shape, dtype=self.dtype, device=self.q.device)

    def state_shapes(self, *count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of G and b as the passes hold them: [..., H, S, K V] and [..., H, S', K]."""
        return (
            (*count, self.heads, self.terms, self.key_dim * self.value_dim),
            (*count, self.heads, self.sum_terms, self.key_dim),
        )

    def new_states(self, *count: int) -> tuple[Tensor, Tensor]:
        """Zeros for G and b in those shapes."""
        G, b = self.state_shapes(*count)
        return self.new(*G), self.new(*b)

    def initial(self) -> tuple[Tensor, Tensor]:
        """The states that the sequences start from, in the same form."""
        G, b = self.new_states(self.sequences)
        if self.G is not None:
            G = self.G.to(self.dtype).flatten(-2)
        if self.b is not None:
            b = self.b.to(self.dtype)
        return G, b
