"""One rate for each head: the memory of RetNet and its kin."""

import math
from typing import Any

import torch
from torch import nn

from vort.memories.gates import Gates, widen
from vort.memories.interface import MemoryInputs
from vort.memories.retention_memory import RetentionMemory
from vort.memories.router import Routing

__all__ = ["ExponentialMemory"]


class ExponentialMemory(RetentionMemory):
    """A token's weight after j steps is e^{-rate j}, the rate learned (or fixed) for each head.

    Rates start spread over the logarithm of the time scales from a few steps to the horizon.

    Args:
        hidden_size: size of hidden states, for the gate.
        num_heads: heads.
        head_dim: size of queries and keys.
        horizon: the longest time scale to start with.
        learn_rates: whether training moves the rates.
        rate: where all rates start instead; with learn_rates=False, the one rate of the paper's
            baseline, to be tuned from outside.
        write_gate: scale what a token writes by a learned gate.
        **options: arguments of `RetentionMemory`.

    >>> memory = ExponentialMemory(16, num_heads=2, head_dim=8)
    >>> memory.terms, bool((memory.log_rate.exp() > 0).all())
    (1, True)
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        horizon: int = 8192,
        learn_rates: bool = True,
        rate: float | None = None,
        write_gate: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(num_heads, head_dim, **options)
        if rate is not None and not 0 < rate < math.inf:
            raise ValueError(f"rate must be positive and finite, got {rate}")
        self.horizon = horizon
        self.rate = rate
        self.log_rate = nn.Parameter(torch.empty(num_heads, 1), requires_grad=learn_rates)
        self.gates = Gates(hidden_size, num_heads, 1, write_gate=write_gate, read_weights=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Rates from 1/4 to 1/horizon, evenly in the logarithm, or all at `rate`."""
        if self.rate is not None:
            self.log_rate.fill_(math.log(self.rate))
            return
        spread = torch.linspace(-math.log(4), -math.log(max(self.horizon, 4)), self.num_heads)
        self.log_rate.copy_(spread[:, None])

    @property
    def terms(self) -> int:
        """One state for each head."""
        return 1

    def route(self, inputs: MemoryInputs) -> Routing:
        """Every token writes 1, or its gate."""
        log_decay = -widen(self.log_rate).exp()
        gate, _ = self.gates(inputs.hidden_states)
        if gate is None:
            gate = log_decay.new_ones(inputs.q.shape[:3])
        return Routing(gate.unsqueeze(-1), log_decay, None, None)
