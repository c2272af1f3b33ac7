"""What a token says about its own writing and reading: a write gate, weights over time scales."""

import torch
from torch import Tensor, nn

__all__ = ["Gates"]


class Gates(nn.Module):
    """A write gate in (0, 1) for each head, and positive read weights over its S time scales.

    Read weights are S · softmax: they average 1, and stay positive so that a normaliser made of
    them does. A common factor would cancel in that normaliser, so a softmax gives nothing away.
    Both start from a nearly constant value: all scales read alike, every token half written.

    Shapes: hidden states `[B, T, hidden_size]`; gate `[B, T, H]`, read `[B, T, H, S]`, both
    float32 (float64 for float64 inputs), None where switched off.

    >>> gates = Gates(hidden_size=16, num_heads=2, terms=8)
    >>> gate, read = gates(torch.randn(1, 5, 16))
    >>> gate.shape, read.shape, torch.allclose(read.mean(-1), torch.ones(1, 5, 2))
    (torch.Size([1, 5, 2]), torch.Size([1, 5, 2, 8]), True)
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        terms: int,
        *,
        write_gate: bool = True,
        read_weights: bool = True,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.terms = terms
        self.write = nn.Linear(hidden_size, num_heads) if write_gate else None
        # One scale leaves nothing to weigh.
        weighs = read_weights and terms > 1
        self.read = nn.Linear(hidden_size, num_heads * terms) if weighs else None
        for projection in (self.write, self.read):
            if projection is not None:
                nn.init.normal_(projection.weight, std=0.02)
                nn.init.zeros_(projection.bias)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """(gate, read) for every token."""
        gate = read = None
        if self.write is not None:
            gate = torch.sigmoid(widen(self.write(hidden_states)))
        if self.read is not None:
            logits = widen(self.read(hidden_states)).unflatten(-1, (self.num_heads, self.terms))
            read = logits.softmax(-1) * self.terms
        return gate, read


def widen(x: Tensor) -> Tensor:
    """At least float32: orders and weights in half precision would cost the kernel its shape."""
    return x if x.dtype == torch.float64 else x.float()
