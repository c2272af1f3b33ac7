"""Mixture-5: a few rates for each head, rates and weights learned."""

import math
from typing import Any

import torch
from torch import nn

from vort.memories.interface import MemoryInputs
from vort.memories.retention_memory import Gates, RetentionMemory, Routing, widen
from vort.memories.settings import LayerSettings

__all__ = ["MixtureMemory"]


class MixtureMemory(RetentionMemory):
    """A token's weight after j steps is Σ_s weight_s e^{-rate_s j}, the same for all tokens.

    Each head has `num_scales` rates and weights of its own; the paper's baseline has 5. With read
    weights the query chooses among the rates, as it does in VORT: the rival to beat.

    >>> MixtureMemory(hidden_size=16, num_attention_heads=2, num_scales=5).log_rate.shape
    torch.Size([2, 5])
    """

    def __init__(self, settings: LayerSettings | None = None, **options: Any) -> None:
        super().__init__(settings, **options)
        shape = (self.num_heads, self.settings.num_scales)
        self.log_rate = nn.Parameter(torch.empty(shape))
        self.log_weight = nn.Parameter(torch.empty(shape))
        self.gates = Gates(self.settings, self.num_scales)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Time scales evenly spaced in the logarithm from 1 to the horizon, weights alike."""
        slowest = -math.log(max(self.settings.horizon, 2))
        self.log_rate.copy_(torch.linspace(0, slowest, self.num_scales))
        self.log_weight.zero_()

    @property
    def num_scales(self) -> int:
        """One state for each rate."""
        return self.log_rate.shape[1]

    def route(self, inputs: MemoryInputs) -> Routing:
        """Every token writes the learned weights, times its gate."""
        gate, read = self.gates(inputs.hidden_states)
        write = widen(self.log_weight).exp().expand(*inputs.q.shape[:3], self.num_scales)
        if gate is not None:
            write = write * gate.unsqueeze(-1)
        return Routing(write, -widen(self.log_rate).exp(), read, None)
