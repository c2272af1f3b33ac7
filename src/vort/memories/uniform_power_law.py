"""Uniform power law: one learned order that all tokens and heads share."""

import math
from typing import Any

import torch
from torch import nn

from vort.memories.gates import Gates, widen
from vort.memories.interface import MemoryInputs
from vort.memories.retention_memory import RetentionMemory
from vort.memories.router import Routing, fit_basis

__all__ = ["UniformPowerLawMemory"]


class UniformPowerLawMemory(RetentionMemory):
    """A token's weight after j steps is w_j(order), with a single order that is learned.

    Args:
        hidden_size: size of hidden states, for the gates.
        num_heads: heads.
        head_dim: size of queries and keys.
        horizon: the largest lag that the kernel is made for.
        terms: exponentials that stand for the kernel.
        order_min: the lowest order.
        start: the order to start from.
        learn_order: whether training moves it; False gives the paper's fixed Power-Law.
        write_gate: scale what a token writes by a learned gate.
        read_weights: let the query weigh the time scales.
        **options: arguments of `RetentionMemory`.

    >>> memory = UniformPowerLawMemory(16, num_heads=2, head_dim=8, horizon=1000)
    >>> round(memory.order().item(), 3)
    0.7
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        horizon: int = 8192,
        terms: int = 8,
        order_min: float = 0.05,
        start: float = 0.7,
        learn_order: bool = True,
        write_gate: bool = False,
        read_weights: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(num_heads, head_dim, **options)
        if not order_min < start < 1:
            raise ValueError(f"start must lie between order_min = {order_min} and 1, got {start}")
        self.basis = fit_basis(horizon, terms, None, order_min)
        self.start = start
        self.order_logit = nn.Parameter(torch.empty(1), requires_grad=learn_order)
        self.gates = Gates(
            hidden_size, num_heads, terms, write_gate=write_gate, read_weights=read_weights
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The order starts at `start`."""
        low = self.basis.order_min
        nn.init.constant_(self.order_logit, math.log((self.start - low) / (1 - self.start)))

    @property
    def terms(self) -> int:
        """One state for each exponential."""
        return self.basis.terms

    def order(self) -> torch.Tensor:
        """The order, `[1]`."""
        low = self.basis.order_min
        return low + (1 - low) * torch.sigmoid(widen(self.order_logit))

    def route(self, inputs: MemoryInputs) -> Routing:
        """Every token writes the weights of the one order, times its gate."""
        order = self.order().expand(inputs.q.shape[:3])
        gate, read = self.gates(inputs.hidden_states)
        write = self.basis.weights(self.order(), validate=False).expand(*order.shape, self.terms)
        if gate is not None:
            write = write * gate.unsqueeze(-1)
        return Routing(write, self.basis.log_decay.to(write.device), read, order)
