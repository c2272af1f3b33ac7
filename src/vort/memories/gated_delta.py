"""Gated DeltaNet: a state that decays by the token, and a token that replaces what its key finds.

`gated_delta_chunk` computes it in chunks, in PyTorch. Within a chunk, what tokens change is the
solution of a triangular system: each must know what those before it changed.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vort.memories.interface import Memory, MemoryInputs, MemoryOutput, State
from vort.memories.mamba2 import TokenDecay, decays_within
from vort.memories.recurrence import call_op, each_sequence, fla_kernels, scalar_gates_train
from vort.memories.retention_memory import GateProjection, widen
from vort.memories.settings import LayerSettings

__all__ = ["GatedDeltaMemory", "gated_delta_chunk"]


class GatedDeltaMemory(Memory):
    """G_t = a_t G_{t-1} + b_t k_t (v_t - a_t k_tᵀ G_{t-1})ᵀ, o_t = q_t G_t / sqrt(D).

    Yang, Kautz and Hatamizadeh (2024), in the layer that all memories share: a_t is Mamba-2's decay
    (`TokenDecay`), b_t = sigmoid(W x_t) how much of what the key finds is replaced; queries and
    keys have length 1. Runs flash-linear-attention's kernels where they are installed, tensors are
    on a GPU and the kernels train there, and `gated_delta_chunk` elsewhere.

    >>> memory = GatedDeltaMemory(hidden_size=16, num_attention_heads=2)
    >>> q, k, v = torch.randn(3, 1, 5, 2, 8)
    >>> memory(MemoryInputs(torch.randn(1, 5, 16), q, k, v)).output.shape, memory.state_size()
    (torch.Size([1, 5, 2, 8]), 128)
    """

    records_steps: ClassVar[bool] = True

    def __init__(self, settings: LayerSettings | None = None, **options: Any) -> None:
        super().__init__(settings, **options)
        self.gate_decay = TokenDecay(self.settings.hidden_size, self.num_heads)
        self.gate_write = GateProjection(self.settings.hidden_size, self.num_heads, bias=False)
        nn.init.normal_(self.gate_write.weight, std=0.02)

    def forward(
        self, inputs: MemoryInputs, state: State | None = None, *, output_state: bool = False
    ) -> MemoryOutput:
        """Gated retrieval; see `Memory`."""
        _, log_decay = self.gate_decay(inputs.hidden_states)
        write = torch.sigmoid(widen(self.gate_write(inputs.hidden_states)))
        padding, inputs = inputs.padding, inputs.with_all_heads()
        if padding is not None:
            # Padding replaces nothing and ages nothing.
            real = padding.real[..., None]
            write, log_decay = write.masked_fill(~real, 0), log_decay.masked_fill(~real, 0)
        q, k = (_unit(widen(x)).to(inputs.v.dtype) for x in (inputs.q, inputs.k))
        found = call_op(
            _kernel(q),
            (q, k, inputs.v),
            inputs,
            state,
            output_state,
            scale=self.head_dim**-0.5,
            g=log_decay,
            beta=write.to(q.dtype),
        )
        return MemoryOutput(found[0].to(inputs.v.dtype), found[1])

    def state_size(self, length: int = 0) -> int:
        """One matrix for each head."""
        return self.num_heads * self.head_dim**2


def _unit(x: Tensor) -> Tensor:
    """x over its length; zeros, as padding is, stay zeros, with derivatives of any order.

    `F.normalize` has none but the first there.
    """
    return x / x.square().sum(-1, keepdim=True).clamp(min=1e-24).sqrt()


def _kernel(q: Tensor) -> Any:
    """flash-linear-attention's op for a GPU, if it is there and trains; else ours."""
    ops = fla_kernels(q, "fla.ops.gated_delta_rule")
    trained = ops is not None and scalar_gates_train(q)
    return ops.chunk_gated_delta_rule if trained else gated_delta_chunk


def gated_delta_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """o_t = scale q_t G_t with G_t = e^{g_t} G_{t-1} + beta_t k_t (v_t - e^{g_t} k_tᵀ G_{t-1})ᵀ.

    Shapes: q, k `[B, T, H, D]`, v `[B, T, H, V]`, g and beta `[B, T, H]`; o like v, in float32 at
    least; states `[N, H, D, V]`. cu_seqlens `[N + 1]` bounds packed sequences, B = 1.

    >>> q, k, v = torch.nn.functional.normalize(torch.randn(3, 1, 100, 2, 8), dim=-1)
    >>> gates = (-torch.rand(1, 100, 2), torch.rand(1, 100, 2))
    >>> o, state = gated_delta_chunk(q, k, v, *gates, output_final_state=True)
    >>> o.shape, state.shape
    (torch.Size([1, 100, 2, 8]), torch.Size([1, 2, 8, 8]))
    """
    tensors = (q, k, v, g.unsqueeze(-1), beta.unsqueeze(-1))
    return each_sequence(_sequence, tensors, scale, initial_state, output_final_state, cu_seqlens)


def _sequence(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    total = log_gate.cumsum(-2)
    decay = decays_within(total)
    # (1 + L) U = beta (V - e^B K G): what tokens change, G being the state before the chunk.
    before = (beta * decay * (k @ k.mT)).tril(-1)
    right = torch.cat([beta * v, beta * total.exp() * k], -1)
    eye = torch.eye(before.shape[-1], dtype=before.dtype, device=before.device)
    solved = torch.linalg.solve_triangular(before + eye, right, upper=False, unitriangular=True)
    own, of_state = solved.split([v.shape[-1], k.shape[-1]], -1)
    scores = (q @ k.mT) * decay
    queries, last = q * total.exp(), total[..., -1:, :]
    keys, kept = k * (last - total).exp(), last.exp()
    # Chunk by chunk only what the next one needs; unbind's backward is one copy for all chunks.
    starts, changes = [], []
    chunks = zip(*(x.unbind(2) for x in (own, of_state, kept, keys.mT)), strict=True)
    for values, taken, share, written in chunks:
        change = values - taken @ state
        starts.append(state)
        changes.append(change)
        state = state * share + written @ change
    return queries @ torch.stack(starts, 2) + scores @ torch.stack(changes, 2), state
