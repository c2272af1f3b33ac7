"""Mixture-5: a few rates for each head, rates and weights learned."""

import math
from typing import Any

import torch
from torch import nn

from vort.memories.gates import Gates, widen
from vort.memories.interface import MemoryInputs
from vort.memories.retention_memory import RetentionMemory
from vort.memories.router import Routing

__all__ = ["MixtureMemory"]


class MixtureMemory(RetentionMemory):
    """A token's weight after j steps is Σ_s weight_s e^{-rate_s j}, the same for all tokens.

    With read weights the query chooses among the rates, as it does in VORT: the rival to beat.

    Args:
        hidden_size: size of hidden states, for the gates.
        num_heads: heads, each with rates and weights of its own.
        head_dim: size of queries and keys.
        components: how many rates; the paper's baseline has 5.
        horizon: the longest time scale to start with.
        write_gate: scale what a token writes by a learned gate.
        read_weights: let the query weigh the rates.
        **options: arguments of `RetentionMemory`.

    >>> MixtureMemory(16, num_heads=2, head_dim=8).log_rate.shape
    torch.Size([2, 5])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        components: int = 5,
        horizon: int = 8192,
        write_gate: bool = False,
        read_weights: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(num_heads, head_dim, **options)
        if components < 1:
            raise ValueError(f"components must be at least 1, got {components}")
        self.components = components
        self.horizon = horizon
        self.log_rate = nn.Parameter(torch.empty(num_heads, components))
        self.log_weight = nn.Parameter(torch.empty(num_heads, components))
        self.gates = Gates(
            hidden_size, num_heads, components, write_gate=write_gate, read_weights=read_weights
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Time scales evenly spaced in the logarithm from 1 to the horizon, weights alike."""
        self.log_rate.copy_(torch.linspace(0, -math.log(max(self.horizon, 2)), self.components))
        self.log_weight.zero_()

    @property
    def terms(self) -> int:
        """One state for each rate."""
        return self.components

    def route(self, inputs: MemoryInputs) -> Routing:
        """Every token writes the learned weights, times its gate."""
        gate, read = self.gates(inputs.hidden_states)
        write = widen(self.log_weight).exp().expand(*inputs.q.shape[:3], self.components)
        if gate is not None:
            write = write * gate.unsqueeze(-1)
        return Routing(write, -widen(self.log_rate).exp(), read, None)
