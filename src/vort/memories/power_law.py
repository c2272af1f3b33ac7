"""One order that all tokens share: its sum of exponentials, or its exact weights."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vort.fractional.gl import gl_kernel
from vort.memories.interface import MemoryInputs, MemoryOutput, State
from vort.memories.retention_memory import (
    Gates,
    RetentionMemory,
    Routing,
    widen,
    without_queries,
)
from vort.memories.settings import LayerSettings
from vort.memories.vort import fit_basis, starting_shares
from vort.ops.retention import exact_retention_with_kernel

__all__ = ["ExactPowerLawMemory", "UniformPowerLawMemory"]

START = 0.7  # the order of the paper's baseline


class UniformPowerLawMemory(RetentionMemory):
    """A token's weight after j steps is w_j(order), with a single order that starts at 0.7.

    It is learned; learn_rates=False gives the paper's fixed Power-Law. With `order_per_head` each
    head learns an order, from where VORT's heads start: VORT, but for one order for all tokens.

    >>> memory = UniformPowerLawMemory(hidden_size=16, num_attention_heads=2, horizon=1000)
    >>> round(memory.order().item(), 3)
    0.7
    """

    def __init__(self, settings: LayerSettings | None = None, **options: Any) -> None:
        super().__init__(settings, **options)
        s = self.settings
        if not s.order_min < START:
            raise ValueError(f"order_min must lie below the first order {START}, got {s.order_min}")
        self.basis = fit_basis(s.horizon, s.num_scales, s.order_min, s.leak)
        orders = self.num_heads if s.order_per_head else 1
        self.order_logit = nn.Parameter(torch.empty(orders), requires_grad=s.learn_rates)
        self.gates = Gates(s, s.num_scales)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The order starts at 0.7; several start as `order_start` says, like VORT's."""
        low, start = self.basis.order_min, self.settings.order_start
        if self.settings.order_per_head and (self.num_heads > 1 or start is not None):
            self.order_logit.copy_(torch.logit(starting_shares(self.num_heads, start)))
            return
        nn.init.constant_(self.order_logit, math.log((START - low) / (1 - START)))

    @property
    def num_scales(self) -> int:
        """One state for each exponential."""
        return self.basis.terms

    def order(self) -> Tensor:
        """The order, `[1]`, or `[H]`: one for each head."""
        low = self.basis.order_min
        return low + (1 - low) * torch.sigmoid(widen(self.order_logit))

    @without_queries
    def route(self, inputs: MemoryInputs) -> Routing:
        """Every token writes the weights of the one order, times its gate."""
        order = self.order()
        gate, read = self.gates(inputs.hidden_states, inputs.asked)
        write = self.basis.weights(order, validate=False).expand(*inputs.positions, self.num_scales)
        if gate is not None:
            write = write * gate.unsqueeze(-1)
        log_decay = self.basis.log_decay_on(order.device)
        return Routing(write, log_decay, read, order.expand(inputs.positions))


class ExactPowerLawMemory(UniformPowerLawMemory):
    """The same by its Grünwald-Letnikov weights themselves, quadratic in length: an ablation.

    What `UniformPowerLawMemory` computes up to the error of its basis. No state stands for such a
    kernel, so it cannot decode, and a query cannot weigh scales that are not there.

    >>> memory = ExactPowerLawMemory(hidden_size=16, num_attention_heads=2, read_weights=False)
    >>> q, k, v = torch.randn(3, 1, 5, 2, 8)
    >>> memory(MemoryInputs(torch.randn(1, 5, 16), q, k, v)).output.shape
    torch.Size([1, 5, 2, 8])
    """

    keeps_state: ClassVar[bool] = False
    takes_parts: ClassVar[bool] = False

    def __init__(self, settings: LayerSettings | None = None, **options: Any) -> None:
        super().__init__(settings, **options)
        if self.settings.order_per_head:
            raise ValueError("order_per_head must be off: the exact kernel has one order for all")
        if self.settings.leak:
            raise ValueError("leak must be off: an exact kernel has no slowest scale")
        if self.settings.read_weights:
            raise ValueError("read_weights must be off: an exact kernel has no scales to weigh")
        if self.normalizer == "undecayed" and self.settings.write_gate:
            raise ValueError('normalizer="undecayed" counts tokens that a write_gate would weigh')

    def forward(
        self, inputs: MemoryInputs, state: State | None = None, *, output_state: bool = False
    ) -> MemoryOutput:
        """What each position retrieves; see `Memory`. States and packing are refused."""
        if state is not None or output_state or inputs.cu_seqlens is not None:
            raise ValueError(
                "the exact convolution keeps no state and packs no sequences: use it for training "
                "and scoring whole sequences, with use_cache=False"
            )
        return super().forward(inputs)

    def state_size(self, length: int = 0) -> int:
        """Everything: a key and a value for each token."""
        return length * self.num_heads * (self.key_map.output_dim + self.head_dim)

    def _retrieve(
        self, inputs: MemoryInputs, routing: Routing, state: State | None, output_state: bool
    ) -> tuple[Tensor, State | None]:
        """Tokens stand before padding, so what padding writes no token sees."""
        gate, _ = self.gates(inputs.hidden_states)
        key = inputs.k if gate is None else inputs.k * gate.unsqueeze(-1).to(inputs.k.dtype)
        order = self.order()
        lags = torch.arange(inputs.q.shape[1], device=order.device)
        weights = gl_kernel(order, lags).to(order.dtype)
        output = exact_retention_with_kernel(
            inputs.q,
            key,
            inputs.v,
            order.expand(inputs.q.shape[:3]),
            lambda _, lag: weights[lag],
            normalizer=self.normalizer,
            include_self=self.include_self,
            eps=self.eps,
        )
        return output, None
