"""Mixture-5 and its kin: a few rates for each head, rates and weights learned."""

import math
from typing import Any

import torch
from torch import nn

from vort.memories.interface import MemoryInputs
from vort.memories.retention_memory import (
    Gates,
    RetentionMemory,
    Routing,
    widen,
    without_queries,
    write_gain,
)
from vort.memories.settings import LayerSettings
from vort.memories.vort import fit_basis

__all__ = ["MixtureMemory"]


class MixtureMemory(RetentionMemory):
    """A token's weight after j steps is Σ_s weight_s e^{-rate_s j}, the same for all tokens.

    Each head has `num_scales` rates and weights of its own; the paper's baseline has 5. With read
    weights the query chooses among the rates, as it does in VORT: the rival to beat.

    Its rates are learned, VORT's are not. VORT's tokens have an order each, and what they write to
    a slow scale differs by it without a bound; a gate stops at 1. `write_gain="token"` gives tokens
    of a mixture a gain without a bound, for all scales alike: what it has not is VORT's say of a
    token over how long it is kept. `write_gain="scale"` has that too, as S free numbers for a token
    where VORT has one order.

    >>> MixtureMemory(hidden_size=16, num_attention_heads=2, num_scales=5).log_rate.shape
    torch.Size([2, 5])
    """

    def __init__(self, settings: LayerSettings | None = None, **options: Any) -> None:
        super().__init__(settings, **options)
        shape = (self.num_heads, self.settings.num_scales)
        self.log_rate = nn.Parameter(torch.empty(shape))
        self.log_weight = nn.Parameter(torch.empty(shape))
        self.gates = Gates(self.settings, self.num_scales)
        self.gate_gain = write_gain(self.settings, self.num_scales)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Time scales evenly spaced in the logarithm from 1 to the horizon, weights alike.

        Or, with rates_start="basis", those of VORT's basis.
        """
        s = self.settings
        if s.rates_start == "basis":
            rates = torch.tensor(fit_basis(s.horizon, s.num_scales, s.order_min).rates)
            # The slowest of the basis is 0, which has no logarithm to learn.
            self.log_rate.copy_(rates.clamp(min=0.01 / s.horizon).log())
        else:
            slowest = -math.log(max(s.horizon, 2))
            self.log_rate.copy_(torch.linspace(0, slowest, self.num_scales))
        self.log_weight.zero_()

    @property
    def num_scales(self) -> int:
        """One state for each rate."""
        return self.log_rate.shape[1]

    @without_queries
    def route(self, inputs: MemoryInputs) -> Routing:
        """Every token writes the learned weights, times its gate and its gain."""
        gate, read = self.gates(inputs.hidden_states, inputs.asked)
        write = widen(self.log_weight).exp().expand(*inputs.positions, self.num_scales)
        if gate is not None:
            write = write * gate.unsqueeze(-1)
        if self.gate_gain is not None:
            write = write * self.gate_gain(inputs.hidden_states)
        return Routing(write, -widen(self.log_rate).exp(), read, None)
