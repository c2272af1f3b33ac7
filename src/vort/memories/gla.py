"""Gated linear attention: a decay for every step and key dimension, chosen by the token."""

import importlib.util
from typing import Any

from torch import Tensor, nn

from vort.memories.gates import widen
from vort.memories.gla_chunk import gla_chunk
from vort.memories.interface import Memory, MemoryInputs, MemoryOutput, State

__all__ = ["GatedLinearMemory"]


class GatedLinearMemory(Memory):
    """G_t = diag(a_t) G_{t-1} + k_t v_tᵀ, o_t = q_t G_t / sqrt(D), a_t = sigmoid(W x)^(1/16).

    Runs flash-linear-attention's kernels where they are installed and tensors are on a GPU, and
    `gla_chunk` elsewhere.

    Args:
        hidden_size: size of hidden states.
        num_heads: heads.
        head_dim: size of queries, keys and values.
        gate_rank: rank of the projection behind the gates.
        gate_power: how much slower than a sigmoid a gate forgets.

    >>> import torch
    >>> memory = GatedLinearMemory(16, num_heads=2, head_dim=8)
    >>> q, k, v = torch.randn(3, 1, 5, 2, 8)
    >>> memory(MemoryInputs(torch.randn(1, 5, 16), q, k, v)).output.shape
    torch.Size([1, 5, 2, 8])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        gate_rank: int = 16,
        gate_power: float = 16.0,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.gate_power = gate_power
        self.gate_in = nn.Linear(hidden_size, gate_rank, bias=False)
        self.gate_out = nn.Linear(gate_rank, num_heads * head_dim)

    def forward(
        self, inputs: MemoryInputs, state: State | None = None, *, output_state: bool = False
    ) -> MemoryOutput:
        """Gated retrieval; see `Memory`."""
        logits = widen(self.gate_out(self.gate_in(inputs.hidden_states)))
        log_gate = nn.functional.logsigmoid(logits) / self.gate_power
        log_gate = log_gate.unflatten(-1, (self.num_heads, self.head_dim))
        padding, inputs = inputs.padding, inputs.with_all_heads()
        k = inputs.k
        if padding is not None:
            # A gate of 1 and no key: padding leaves the state as it is.
            real = padding.real[..., None, None]
            log_gate, k = log_gate.masked_fill(~real, 0), k.masked_fill(~real, 0)
        before = None if state is None else state["G"]
        run = _fla_kernel(inputs.q) or gla_chunk
        output, after = run(
            inputs.q,
            k,
            inputs.v,
            log_gate,
            scale=self.head_dim**-0.5,
            initial_state=before,
            output_final_state=output_state,
            cu_seqlens=inputs.cu_seqlens,
        )
        found = None if after is None else {"G": after}
        return MemoryOutput(output.to(inputs.v.dtype), found)

    def state_size(self, length: int = 0) -> int:
        """One matrix for each head."""
        return self.num_heads * self.head_dim**2


def _fla_kernel(q: Tensor) -> Any:
    """flash-linear-attention's op for a GPU, if it is installed."""
    if q.device.type != "cuda" or importlib.util.find_spec("fla") is None:
        return None
    from fla.ops.gla import chunk_gla, fused_recurrent_gla

    if q.shape[1] > 1:
        return chunk_gla

    def one_step(q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, **options: Any) -> Any:
        # The two kernels name the gate differently.
        return fused_recurrent_gla(q, k, v, gk=log_gate, **options)

    return one_step
