"""Gated linear attention: a decay for every step and key dimension, chosen by the token.

`gla_chunk` computes it in chunks, in PyTorch. With B_t the sum of log gates up to t, the score of t
and i is Σ_d q_td k_id e^{B_td - B_id}. Splitting that exponent into e^{B_t} and e^{-B_i}
overflows; here every exponent stays <= 0: between blocks both halves are taken relative to the
start of the later block, and within a block of 16 the difference is formed before exp.

Two memories have it: as its authors wrote it, and with VORT's state, feature map and gates.
"""

import importlib
import importlib.util
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vort.memories.interface import Memory, MemoryInputs, MemoryOutput, State
from vort.memories.retention_memory import (
    EPS_SIGNED,
    GateProjection,
    Gates,
    feature_maps,
    widen,
)
from vort.memories.settings import LayerSettings
from vort.ops.retention import DEFAULT_EPS

__all__ = [
    "GatedLinearMemory",
    "GatedScalesMemory",
    "each_sequence",
    "fla_kernels",
    "gla_chunk",
    "gla_exact",
    "in_chunks",
]

GATE_RANK = 16  # of the projection behind the gates
GATE_POWER = 16.0  # how much slower than a sigmoid a gate forgets
CHUNK, BLOCK = 64, 16


class GatedLinearMemory(Memory):
    """G_t = diag(a_t) G_{t-1} + k_t v_tᵀ, o_t = q_t G_t / sqrt(D), a_t = sigmoid(W x)^(1/16).

    Runs flash-linear-attention's kernels where they are installed and tensors are on a GPU, and
    `gla_chunk` elsewhere.

    >>> memory = GatedLinearMemory(hidden_size=16, num_attention_heads=2)
    >>> q, k, v = torch.randn(3, 1, 5, 2, 8)
    >>> memory(MemoryInputs(torch.randn(1, 5, 16), q, k, v)).output.shape
    torch.Size([1, 5, 2, 8])
    """

    takes_parts: ClassVar[bool] = True

    def __init__(self, settings: LayerSettings | None = None, **options: Any) -> None:
        super().__init__(settings, **options)
        self.gate_in = GateProjection(self.settings.hidden_size, GATE_RANK, bias=False)
        self.gate_out = GateProjection(GATE_RANK, self.num_heads * self.head_dim)

    def forward(
        self, inputs: MemoryInputs, state: State | None = None, *, output_state: bool = False
    ) -> MemoryOutput:
        """Gated retrieval; see `Memory`."""
        log_gate = _log_gates(self.gate_out(self.gate_in(inputs.hidden_states)))
        log_gate = log_gate.unflatten(-1, (self.num_heads, self.head_dim))
        padding, inputs = inputs.padding, inputs.with_all_heads()
        k = inputs.k
        if padding is not None:
            # A gate of 1 and no key: padding leaves the state as it is.
            real = padding.real[..., None, None]
            log_gate, k = log_gate.masked_fill(~real, 0), k.masked_fill(~real, 0)
        if inputs.part is not None:
            state = inputs.part.gated_before(k, inputs.v, log_gate)
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


class GatedScalesMemory(Memory):
    """Gated linear attention with S states for each head, VORT's feature map and VORT's gates.

    State s of a head is G_t = diag(a_ts) G_{t-1} + gate_t φ(k_t) v_tᵀ, and a query finds the sum of
    read_ts φ(q_t) G_ts over the states, normalised like VORT's. VORT has none of the gates a_ts:
    its rates are constants, and a token chooses once, by its order, how long it is kept. Here
    every later token decides anew what all before it keep, feature by feature, and no token
    chooses for itself.

    Gates begin at constants: time scales evenly in the logarithm from 1 to the horizon over the
    states, as a mixture's.

    >>> memory = GatedScalesMemory(hidden_size=16, num_attention_heads=2, num_scales=3)
    >>> q, k, v = torch.randn(3, 1, 5, 2, 8)
    >>> memory(MemoryInputs(torch.randn(1, 5, 16), q, k, v)).output.shape, memory.state_size()
    (torch.Size([1, 5, 2, 8]), 432)
    """

    takes_parts: ClassVar[bool] = True

    def __init__(self, settings: LayerSettings | None = None, **options: Any) -> None:
        super().__init__(settings, **options)
        s = self.settings
        if not s.include_self:
            raise ValueError('include_self must be on for memory="gla_scales", got False')
        if s.normalizer == "undecayed":
            raise ValueError(
                'normalizer must be "decayed" or "none" for memory="gla_scales", got "undecayed"'
            )
        self.num_scales = s.num_scales
        self.key_map, self.query_map = feature_maps(s)
        self.gates = Gates(s, self.num_scales)
        self.gate_in = GateProjection(s.hidden_size, GATE_RANK, bias=False)
        self.gate_out = DecayProjection(
            self.num_heads, self.num_scales, self.key_map.output_dim, s.horizon
        )

    @property
    def normalized(self) -> bool:
        """Whether a column of ones stands beside the values, to divide by."""
        return self.settings.normalizer == "decayed"

    def forward(
        self, inputs: MemoryInputs, state: State | None = None, *, output_state: bool = False
    ) -> MemoryOutput:
        """Gated retrieval from all states; see `Memory`."""
        sizes = (self.num_heads, self.num_scales)
        logits = self.gate_out(self.gate_in(inputs.hidden_states))
        log_gate = _log_gates(logits).unflatten(-1, (sizes[0] * sizes[1], -1))
        gate, read = self.gates(inputs.hidden_states)
        padding, inputs = inputs.padding, inputs.with_all_heads()
        query_map = self.key_map if self.query_map is None else self.query_map
        q = query_map.map_query(inputs.q) if self.normalized else query_map(inputs.q)
        k, v = self.key_map(inputs.k), inputs.v
        if gate is not None:
            k = (k * gate.unsqueeze(-1)).to(k.dtype)
        if self.normalized:
            v = F.pad(v, (0, 1), value=1.0)
        if padding is not None:
            # A gate of 1 and no key: padding leaves the state as it is.
            real = padding.real[..., None, None]
            log_gate, k = log_gate.masked_fill(~real, 0), k.masked_fill(~real, 0)
        # A state is a head to the kernels: their outputs add up, as those of features do.
        q, k, v = (x.unsqueeze(3).expand(*x.shape[:3], sizes[1], x.shape[-1]) for x in (q, k, v))
        if read is not None:
            q = (q * read.unsqueeze(-1)).to(k.dtype)
        run = _fla_kernel(q) or gla_chunk
        q, k, v = (x.flatten(2, 3).contiguous() for x in (q, k, v))
        if inputs.part is not None:
            state = inputs.part.gated_before(k, v, log_gate)
        found, after = run(
            q,
            k,
            v,
            log_gate,
            scale=1.0,
            initial_state=None if state is None else state["G"],
            output_final_state=output_state,
            cu_seqlens=inputs.cu_seqlens,
        )
        output = widen(found).unflatten(2, sizes).sum(3)
        if self.normalized:
            eps = DEFAULT_EPS if self.key_map.is_positive else EPS_SIGNED
            output = output[..., :-1] / (output[..., -1:] + eps)
        return MemoryOutput(output.to(inputs.v.dtype), None if after is None else {"G": after})

    def state_size(self, length: int = 0) -> int:
        """S matrices of features times values for each head, and what the normaliser needs."""
        columns = self.head_dim + self.normalized
        return self.num_heads * self.num_scales * self.key_map.output_dim * columns


class DecayProjection(GateProjection):
    """Logits of the gates of every head, state and feature, which begin at S time scales."""

    def __init__(self, heads: int, scales: int, features: int, horizon: int) -> None:
        # first: the constructor draws the weights
        self.sizes, self.horizon = (heads, scales, features), horizon
        super().__init__(GATE_RANK, heads * scales * features)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Small weights, and biases at which a state forgets at its rate, all features alike."""
        nn.init.normal_(self.weight, std=0.02)
        rates = torch.logspace(0, -math.log10(max(self.horizon, 2)), self.sizes[1])
        # sigmoid(b)^(1/16) = e^-rate, with e^x - 1 in the one form that keeps small rates.
        biases = -torch.log(torch.expm1(GATE_POWER * rates))
        self.bias.view(self.sizes).copy_(biases[:, None].expand(self.sizes))


def _log_gates(logits: Tensor) -> Tensor:
    """log a = log sigmoid(logits) / 16, in float32 at least."""
    return F.logsigmoid(widen(logits)) / GATE_POWER


def fla_kernels(q: Tensor, module: str) -> Any:
    """flash-linear-attention's module of ops, such as "fla.ops.gla", if it runs for tensors like q.

    None: the tensors are on no GPU, or it is not installed.
    """
    if q.device.type != "cuda" or importlib.util.find_spec("fla") is None:
        return None
    return importlib.import_module(module)


def _fla_kernel(q: Tensor) -> Any:
    """Their op for a GPU, if it is there."""
    ops = fla_kernels(q, "fla.ops.gla")
    if ops is None or q.shape[1] > 1:
        return None if ops is None else ops.chunk_gla

    def one_step(q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, **options: Any) -> Any:
        # The two kernels name the gate differently.
        return ops.fused_recurrent_gla(q, k, v, gk=log_gate, **options)

    return one_step


def gla_chunk(
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
    """o_t = scale Σ_{i<=t} (q_t ⊙ e^{B_t - B_i}) · k_i v_i, and the state after the last token.

    Shapes: q, k, log_gate `[B, T, H, D]`, v `[B, T, H, V]`; o like v, in float32 at least; states
    `[N, H, D, V]`. cu_seqlens `[N + 1]` bounds packed sequences, B = 1.

    >>> q, k, v = torch.randn(3, 1, 100, 2, 8)
    >>> o, state = gla_chunk(q, k, v, -torch.rand(1, 100, 2, 8), output_final_state=True)
    >>> o.shape, state.shape
    (torch.Size([1, 100, 2, 8]), torch.Size([1, 2, 8, 8]))
    """
    options = (initial_state, output_final_state, cu_seqlens)
    return each_sequence(_sequence, (q, k, v, log_gate), scale, *options)


# Tensors `[B, T, H, ...]`, the first of them queries, and a state, to outputs and a state.
Recurrence = Callable[..., tuple[Tensor, Tensor]]


def each_sequence(
    run: Recurrence,
    tensors: tuple[Tensor, ...],
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """A recurrence of whole sequences, called as flash-linear-attention's ops are.

    Args:
        run: outputs and the last state from the tensors of rows and the state before, or None.
        tensors: `[B, T, H, ...]`, queries first; widened to float32 at least.
        scale: of the queries.
        initial_state: `[N, H, D, V]`.
        output_final_state: whether the last states are wanted.
        cu_seqlens: `[N + 1]` bounds of packed sequences, B = 1.
    """
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    q, *rest = (x.to(dtype) for x in tensors)
    with torch.autocast(q.device.type, enabled=False):
        if cu_seqlens is None:
            o, state = run(q * scale, *rest, initial_state)
            return o, state if output_final_state else None
        outputs, states = [], []
        for index, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
            parts = [x[:, start:stop] for x in (q * scale, *rest)]
            before = None if initial_state is None else initial_state[index : index + 1]
            o, state = run(*parts, before)
            outputs.append(o)
            states.append(state)
        return torch.cat(outputs, 1), torch.cat(states) if output_final_state else None


def gla_exact(q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, *, scale: float = 1.0) -> Tensor:
    """The definition, every pair of positions: what `gla_chunk` is tested against."""
    total = log_gate.cumsum(1)
    decay = (total[:, :, None] - total[:, None]).clamp(max=0).exp()
    scores = torch.einsum("bthd,btihd,bihd->bhti", q * scale, decay, k).tril()
    return torch.einsum("bhti,bihv->bthv", scores, v)


def _sequence(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    batch, length, heads, dim = q.shape
    if state is None:
        state = q.new_zeros(batch, heads, dim, v.shape[-1])
    state = state.to(q.dtype)
    if length == 0:
        return torch.zeros_like(v), state
    q, k, v, log_gate = in_chunks(q, k, v, log_gate)
    total = log_gate.cumsum(-2)
    o = _within(q, k, log_gate, total) @ v
    last = total[..., -1:, :]
    added = (k * (last - total).exp()).mT @ v
    kept = last.mT.exp()
    starts = []
    for index in range(q.shape[2]):
        starts.append(state)
        state = state * kept[:, :, index] + added[:, :, index]
    o = o + (q * total.exp()) @ torch.stack(starts, 2)
    return o.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :length], state


def in_chunks(*tensors: Tensor) -> list[Tensor]:
    """Tensors `[B, T, H, ·]` as `[B, H, chunks, chunk, ·]`, zeros behind the last step.

    A step of zeros has gate 1 and no key, so it changes nothing.
    """
    length = tensors[0].shape[1]
    chunk = min(CHUNK, -(-length // BLOCK) * BLOCK)
    tail = -length % chunk
    return [
        F.pad(x, (0, 0, 0, 0, 0, tail)).unflatten(1, (-1, chunk)).permute(0, 3, 1, 2, 4)
        for x in tensors
    ]


def _within(q: Tensor, k: Tensor, log_gate: Tensor, total: Tensor) -> Tensor:
    """Scores between positions of one chunk, `[..., chunk, chunk]`."""
    chunk = q.shape[-2]
    blocks = chunk // BLOCK
    q, k_block, total_block = (x.unflatten(-2, (blocks, BLOCK)) for x in (q, k, total))
    # What the gates have summed to before each block.
    start = total_block[..., :1, :] - log_gate.unflatten(-2, (blocks, BLOCK))[..., :1, :]
    late = q * (total_block - start).exp()
    early = k.unsqueeze(-3) * (start - total.unsqueeze(-3)).clamp(max=0).exp()
    position = torch.arange(chunk, device=q.device)
    before = position < torch.arange(0, chunk, BLOCK, device=q.device)[:, None, None]
    scores = (late @ early.mT).masked_fill(~before, 0)
    difference = (total_block.unsqueeze(-2) - total_block.unsqueeze(-3)).clamp(max=0)
    near = ((q.unsqueeze(-2) * k_block.unsqueeze(-3)) * difference.exp()).sum(-1).tril()
    result: Tensor = (scores + _on_diagonal(near)).flatten(-3, -2)
    return result


def _on_diagonal(near: Tensor) -> Tensor:
    """Blocks `[..., n, 16, 16]` in the places they have among `[..., n, 16, n * 16]`."""
    count = near.shape[-3]
    eye = torch.eye(count, dtype=near.dtype, device=near.device)
    placed = near.unsqueeze(-2) * eye[:, None, :, None]
    return placed.flatten(-2)
