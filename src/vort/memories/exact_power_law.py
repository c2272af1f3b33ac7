"""The exact fractional convolution: the paper's ablation of its sum of exponentials."""

from typing import Any

import torch
from torch import Tensor

from vort.fractional.gl import gl_kernel
from vort.memories.interface import MemoryInputs, MemoryOutput, State
from vort.memories.router import Routing
from vort.memories.uniform_power_law import UniformPowerLawMemory
from vort.ops.retention.exact import exact_retention_with_kernel

__all__ = ["ExactPowerLawMemory"]


class ExactPowerLawMemory(UniformPowerLawMemory):
    """One order for all tokens, its Grünwald-Letnikov weights themselves; quadratic in length.

    What `UniformPowerLawMemory` computes up to the error of its basis. No state stands for such a
    kernel, so it cannot decode, and a query cannot weigh time scales that are not there.

    Args:
        hidden_size: as for `UniformPowerLawMemory`, like the rest.
        num_heads: see there.
        head_dim: see there.
        **options: see there; `read_weights` and `normalizer="undecayed"` excepted.

    >>> memory = ExactPowerLawMemory(16, num_heads=2, head_dim=8, horizon=1000)
    >>> q, k, v = torch.randn(3, 1, 5, 2, 8)
    >>> memory(MemoryInputs(torch.randn(1, 5, 16), q, k, v)).output.shape
    torch.Size([1, 5, 2, 8])
    """

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int, **options: Any) -> None:
        if options.get("read_weights"):
            raise ValueError(
                "read_weights must be off: an exact kernel has no time scales to weigh"
            )
        if options.get("normalizer") == "undecayed" and options.get("write_gate"):
            raise ValueError('normalizer="undecayed" counts tokens that a write_gate would weigh')
        super().__init__(hidden_size, num_heads, head_dim, **options)

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
        return length * self.num_heads * (self.key_map.output_dim + self.value_dim)

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
        )
        return output, None
