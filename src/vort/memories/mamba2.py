"""Mamba-2's recurrence: one decay for every step and head, chosen by the token.

Mamba-2 (Dao and Gu 2024) takes steps of a learned length Δ_t: the state decays by e^{-A Δ_t}, and
the token is written Δ_t times. Here it stands in the layer that all memories share: queries and
keys are the layer's (its C and B), values its x. Its skip connection and its own convolution and
gate are left out: the layer has a window, a convolution and a gate for all.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vort.memories.interface import Memory, MemoryInputs, MemoryOutput, State
from vort.memories.recurrence import (
    call_op,
    carried,
    each_sequence,
    fla_kernels,
    scalar_gates_train,
)
from vort.memories.retention_memory import GateProjection, widen
from vort.memories.settings import LayerSettings

__all__ = ["Mamba2Memory", "TokenDecay", "scalar_gated_chunk"]

# Where step lengths and rates begin, as in Mamba-2.
STEPS, RATES = (0.1, 0.001), (16.0, 1.0)


class Mamba2Memory(Memory):
    """G_t = e^{-A Δ_t} G_{t-1} + Δ_t k_t v_tᵀ, o_t = q_t G_t / sqrt(D), Δ_t = softplus(W x_t + b).

    A and b are learned for each head. Runs flash-linear-attention's kernels where they are
    installed, tensors are on a GPU and the kernels train there, and `scalar_gated_chunk` elsewhere.

    >>> memory = Mamba2Memory(hidden_size=16, num_attention_heads=2)
    >>> q, k, v = torch.randn(3, 1, 5, 2, 8)
    >>> memory(MemoryInputs(torch.randn(1, 5, 16), q, k, v)).output.shape, memory.state_size()
    (torch.Size([1, 5, 2, 8]), 128)
    """

    takes_parts: ClassVar[bool] = True
    records_steps: ClassVar[bool] = True

    def __init__(self, settings: LayerSettings | None = None, **options: Any) -> None:
        super().__init__(settings, **options)
        self.gate_decay = TokenDecay(self.settings.hidden_size, self.num_heads)

    def forward(
        self, inputs: MemoryInputs, state: State | None = None, *, output_state: bool = False
    ) -> MemoryOutput:
        """Gated retrieval; see `Memory`."""
        step, log_decay = self.gate_decay(inputs.hidden_states)
        padding, inputs = inputs.padding, inputs.with_all_heads()
        if padding is not None:
            # A step of no length writes nothing and ages nothing.
            real = padding.real[..., None]
            step, log_decay = step.masked_fill(~real, 0), log_decay.masked_fill(~real, 0)
        k = (inputs.k * step.unsqueeze(-1)).to(inputs.k.dtype)
        if inputs.part is not None:
            gates = log_decay.unsqueeze(-1).expand_as(k)
            state = inputs.part.gated_before(k, inputs.v, gates)
        tensors, scale = (inputs.q, k, inputs.v, log_decay), self.head_dim**-0.5
        found = call_op(_kernel(inputs.q), tensors, inputs, state, output_state, scale=scale)
        return MemoryOutput(found[0].to(inputs.v.dtype), found[1])

    def state_size(self, length: int = 0) -> int:
        """One matrix for each head."""
        return self.num_heads * self.head_dim**2


class TokenDecay(nn.Module):
    """Step lengths Δ = softplus(W x + b) and log decays -A Δ, both `[B, T, H]`, float32 at least.

    Heads begin spread over Mamba-2's ranges, the first with the longest steps and the fastest rate:
    they forget within 1 step to 1,000. It draws them at random, which is luck where heads are few.

    >>> step, log_decay = TokenDecay(16, 2)(torch.randn(1, 5, 16))
    >>> step.shape, bool((step > 0).all() and (log_decay < 0).all())
    (torch.Size([1, 5, 2]), True)
    """

    def __init__(self, hidden_size: int, heads: int) -> None:
        super().__init__()
        self.step = GateProjection(hidden_size, heads, bias=False)
        nn.init.normal_(self.step.weight, std=0.02)
        self.step_bias = nn.Parameter(torch.empty(heads))
        self.log_rate = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Evenly in the logarithm over the heads; a head alone in the middle."""
        heads = len(self.step_bias)
        places = torch.linspace(0, 1, heads) if heads > 1 else torch.tensor([0.5])
        steps, rates = (
            math.log(first) + places * math.log(last / first) for first, last in (STEPS, RATES)
        )
        # softplus(b) = Δ
        self.step_bias.copy_(steps.exp().expm1().log())
        self.log_rate.copy_(rates)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """(Δ, -A Δ) for every token."""
        step = F.softplus(widen(self.step(hidden_states)) + widen(self.step_bias))
        return step, -widen(self.log_rate).exp() * step


def _kernel(q: Tensor) -> Any:
    """flash-linear-attention's op for a GPU, if it is there and trains; else ours."""
    ops = fla_kernels(q, "fla.ops.simple_gla")
    return ops.chunk_simple_gla if ops is not None and scalar_gates_train(q) else scalar_gated_chunk


def scalar_gated_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gate: Tensor,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """o_t = scale Σ_{i<=t} e^{B_t - B_i} (q_t · k_i) v_i, and the state after the last token.

    B_t is the sum of log gates up to t. Shapes as in `gla_chunk`, but log_gate `[B, T, H]`.

    >>> q, k, v = torch.randn(3, 1, 100, 2, 8)
    >>> o, state = scalar_gated_chunk(q, k, v, -torch.rand(1, 100, 2), output_final_state=True)
    >>> o.shape, state.shape
    (torch.Size([1, 100, 2, 8]), torch.Size([1, 2, 8, 8]))
    """
    options = (initial_state, output_final_state, cu_seqlens)
    return each_sequence(_sequence, (q, k, v, log_gate.unsqueeze(-1)), scale, *options)


def decays_within(total: Tensor) -> Tensor:
    """e^{B_t - B_i} for i <= t, else 0, `[..., chunk, chunk]`, of sums `[..., chunk, 1]`."""
    later = torch.ones(total.shape[-2], total.shape[-2], dtype=torch.bool, device=total.device)
    # Before exp, where a sum of gates the other way round would overflow.
    return (total - total.mT).masked_fill(later.triu(1), -torch.inf).exp()


def _sequence(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    total = log_gate.cumsum(-2)
    last = total[..., -1:, :]
    added = (k * (last - total).exp()).mT @ v
    starts, state = carried(state, last.exp(), added)
    return ((q @ k.mT) * decays_within(total)) @ v + (q * total.exp()) @ starts, state
