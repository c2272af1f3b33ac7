"""What the passes are given, with the sizes and tables that follow from it."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vort.ops.retention.chunk.decays import Decays
from vort.ops.retention.chunk.gated_weights import GatedWeights
from vort.ops.retention.chunk.lag_weights import LagWeights
from vort.ops.retention.chunk.layout import Layout, Plan, make_layout
from vort.ops.retention.chunk.workspace import Workspace
from vort.ops.retention.state import compute_dtype, state_terms

__all__ = ["Problem"]


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
        kind = LagWeights if self.read is None else GatedWeights
        self.weights: LagWeights | GatedWeights = kind(self.decays, self.workspace)

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
