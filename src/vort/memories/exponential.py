"""One rate for each head, the memory of RetNet and its kin; or none: linear attention."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from vort.memories.interface import MemoryInputs
from vort.memories.retention_memory import (
    Gates,
    RetentionMemory,
    Routing,
    widen,
    without_queries,
)
from vort.memories.settings import LayerSettings

__all__ = ["ExponentialMemory", "LinearMemory"]


class ExponentialMemory(RetentionMemory):
    """A token's weight after j steps is e^{-rate j}, the rate learned (or fixed) for each head.

    Rates start spread over the logarithm of the time scales from a few steps to the horizon (a
    head alone in the middle of it), or all at `exponential_rate`: with learn_rates=False, the one
    rate of the paper's baseline, to be tuned from outside.

    >>> memory = ExponentialMemory(hidden_size=16, num_attention_heads=2)
    >>> memory.num_scales, bool((memory.log_rate.exp() > 0).all())
    (1, True)
    """

    def __init__(self, settings: LayerSettings | None = None, **options: Any) -> None:
        super().__init__(settings, **options)
        s = self.settings
        self.log_rate = nn.Parameter(torch.empty(self.num_heads, 1), requires_grad=s.learn_rates)
        self.gates = Gates(s, 1)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Rates from 1/4 to 1/horizon, evenly in the logarithm, or all at `exponential_rate`."""
        if self.settings.exponential_rate is not None:
            self.log_rate.fill_(math.log(self.settings.exponential_rate))
            return
        fastest, slowest = -math.log(4), -math.log(max(self.settings.horizon, 4))
        if self.num_heads == 1:
            # A rate of 1/4 would leave a head alone blind to all but its neighbours.
            self.log_rate.fill_((fastest + slowest) / 2)
            return
        self.log_rate.copy_(torch.linspace(fastest, slowest, self.num_heads)[:, None])

    @property
    def num_scales(self) -> int:
        """One state for each head."""
        return 1

    @without_queries
    def route(self, inputs: MemoryInputs) -> Routing:
        """Every token writes 1, or its gate."""
        return _one_scale(self.gates, inputs, -widen(self.log_rate).exp())


class LinearMemory(RetentionMemory):
    """Nothing is forgotten: linear attention, whose write gate alone keeps tokens out.

    >>> memory = LinearMemory(hidden_size=16, num_attention_heads=2)
    >>> q, k, v = torch.randn(3, 1, 5, 2, 8)
    >>> memory.route(MemoryInputs(torch.randn(1, 5, 16), q, k, v)).log_decay
    tensor([0.])
    """

    def __init__(self, settings: LayerSettings | None = None, **options: Any) -> None:
        super().__init__(settings, **options)
        self.gates = Gates(self.settings, 1)

    @property
    def num_scales(self) -> int:
        """One state for each head."""
        return 1

    @without_queries
    def route(self, inputs: MemoryInputs) -> Routing:
        """Every token writes 1, or its gate, for good."""
        dtype = widen(inputs.hidden_states[:0]).dtype
        return _one_scale(self.gates, inputs, inputs.q.new_zeros(1, dtype=dtype))


def _one_scale(gates: Gates, inputs: MemoryInputs, log_decay: Tensor) -> Routing:
    """Every token writes 1, or its gate, to one scale."""
    gate, _ = gates(inputs.hidden_states)
    if gate is None:
        gate = log_decay.new_ones(inputs.positions)
    return Routing(gate.unsqueeze(-1), log_decay, None, None)
