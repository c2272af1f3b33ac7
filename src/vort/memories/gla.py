"""Gated linear attention: a decay for every step and key dimension, chosen by the token.

`gla_chunk` computes it in chunks, in PyTorch. With B_t the sum of log gates up to t, the score of t
and i is Σ_d q_td k_id e^{B_td - B_id}. Splitting that exponent into e^{B_t} and e^{-B_i}
overflows; here every exponent stays <= 0: between blocks both halves are taken relative to the
start of the later block, and within a block of 16 the difference is formed before exp.

Two memories have it: as its authors wrote it, and with VORT's state, feature map and gates. Where
only a few positions are asked for, on a GPU, `vort.ops.gated` reads at these alone.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vort.memories.interface import Memory, MemoryInputs, MemoryOutput, State
from vort.memories.recurrence import BLOCK, call_op, carried, each_sequence, fla_kernels
from vort.memories.retention_memory import (
    EPS_SIGNED,
    GateProjection,
    Gates,
    feature_maps,
    widen,
)
from vort.memories.settings import LayerSettings
from vort.ops.asked import Asked, pick
from vort.ops.custom import traced
from vort.ops.gated import GatedInputs, gated_of_asked, walk_pays
from vort.ops.gpu.launcher import kernels_take
from vort.ops.linear import is_bare, is_watched
from vort.ops.retention import DEFAULT_EPS
from vort.ops.retention.exact import normalize
from vort.ops.retention.inputs import wants_grad

__all__ = ["GatedLinearMemory", "GatedScalesMemory", "gla_chunk", "gla_exact"]

GATE_RANK = 16  # of the projection behind the gates
GATE_POWER = 16.0  # how much slower than a sigmoid a gate forgets


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
    records_steps: ClassVar[bool] = True

    def __init__(self, settings: LayerSettings | None = None, **options: Any) -> None:
        super().__init__(settings, **options)
        self.gate_in = GateProjection(self.settings.hidden_size, GATE_RANK, bias=False)
        self.gate_out = GateProjection(GATE_RANK, self.num_heads * self.head_dim)

    def forward(
        self, inputs: MemoryInputs, state: State | None = None, *, output_state: bool = False
    ) -> MemoryOutput:
        """Gated retrieval; see `Memory`."""
        asked = _few(inputs, state, output_state, self.gate_out)
        if asked is not None:
            r = self.gate_in(inputs.hidden_states)
            q = widen(pick(inputs.q, asked)).unsqueeze(2) * self.head_dim**-0.5
            inputs = inputs.with_all_heads()
            output = _at_places(q, inputs.k, inputs.v, r, self.gate_out, asked)
            return MemoryOutput(output.to(inputs.v.dtype))
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
        tensors, scale = (inputs.q, k, inputs.v, log_gate), self.head_dim**-0.5
        found = call_op(_kernel(inputs.q), tensors, inputs, state, output_state, scale=scale)
        return MemoryOutput(found[0].to(inputs.v.dtype), found[1])

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
    records_steps: ClassVar[bool] = True

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
        asked = _few(inputs, state, output_state, self.gate_out, self.key_map.output_dim)
        if asked is not None and not is_watched(self.gates):
            return MemoryOutput(self._at_places(inputs, asked))
        sizes = (self.num_heads, self.num_scales)
        logits = self.gate_out(self.gate_in(inputs.hidden_states))
        log_gate = _log_gates(logits).unflatten(-1, (sizes[0] * sizes[1], -1))
        gate, read = self.gates(inputs.hidden_states)
        padding, inputs = inputs.padding, inputs.with_all_heads()
        q, k, v = self._queries(inputs.q), self._keys(inputs.k, gate), inputs.v
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
        op = _kernel(q)
        q, k, v = (x.flatten(2, 3).contiguous() for x in (q, k, v))
        if inputs.part is not None:
            state = inputs.part.gated_before(k, v, log_gate)
        found, after = call_op(op, (q, k, v, log_gate), inputs, state, output_state, scale=1.0)
        output = self._divided(widen(found).unflatten(2, sizes).sum(3))
        return MemoryOutput(output.to(inputs.v.dtype), after)

    def _at_places(self, inputs: MemoryInputs, asked: Asked) -> Tensor:
        """What positions asked for retrieve; queries and reads are made of these alone."""
        r, gate = self.gate_in(inputs.hidden_states), self.gates.writing(inputs.hidden_states)
        read = self.gates.reading(pick(inputs.hidden_states, asked))
        inputs = inputs.with_all_heads()
        q = widen(self._queries(pick(inputs.q, asked).unsqueeze(0))[0]).unsqueeze(2)
        q = q.expand(-1, -1, self.num_scales, -1) if read is None else q * read.unsqueeze(-1)
        given = (q, self._keys(inputs.k, gate), inputs.v, r, self.gate_out, asked)
        output = _at_places(*given, ones=self.normalized)
        return self._divided(output).to(inputs.v.dtype)

    def _queries(self, q: Tensor) -> Tensor:
        query_map = self.key_map if self.query_map is None else self.query_map
        found: Tensor = query_map.map_query(q) if self.normalized else query_map(q)
        return found

    def _keys(self, k: Tensor, gate: Tensor | None) -> Tensor:
        k = self.key_map(k)
        return k if gate is None else (k * gate.unsqueeze(-1)).to(k.dtype)

    def _divided(self, output: Tensor) -> Tensor:
        """By the last column, where there is a normaliser."""
        if not self.normalized:
            return output
        eps = DEFAULT_EPS if self.key_map.is_positive else EPS_SIGNED
        return normalize(output[..., :-1], output[..., -1], eps)

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


def _few(
    inputs: MemoryInputs,
    state: State | None,
    output_state: bool,
    gate_out: GateProjection,
    features: int | None = None,
) -> Asked | None:
    """Which positions are to be read alone; None: kernels for that know no such call.

    It takes weights past `gate_out`. features: of a key, if it is mapped.
    """
    asked, tensors = inputs.asked, (inputs.q, inputs.k, inputs.v)
    if asked is None or state is not None or output_state or inputs.part is not None:
        return None
    if inputs.padding is not None or inputs.cu_seqlens is not None or traced(inputs.q):
        return None
    sizes = (features or inputs.k.shape[3], inputs.v.shape[3], gate_out.in_features)
    known = kernels_take(*tensors) and is_bare(gate_out, (GateProjection, DecayProjection))
    return asked if known and walk_pays(asked, *sizes) else None


def _at_places(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    gate_out: GateProjection,
    asked: Asked,
    ones: bool = False,
) -> Tensor:
    """`gated_of_asked` with the gates of a projection."""
    tensors = (q, k.to(v.dtype), v, r.to(v.dtype), gate_out.weight, gate_out.bias)
    options = (asked.places, GATE_POWER, ones, wants_grad(*tensors))
    return gated_of_asked(GatedInputs(*tensors, *options))


def _log_gates(logits: Tensor) -> Tensor:
    """log a = log sigmoid(logits) / 16, in float32 at least."""
    return F.logsigmoid(widen(logits)) / GATE_POWER


def _kernel(q: Tensor) -> Any:
    """flash-linear-attention's op for a GPU, if it is there; else ours."""
    ops = fla_kernels(q, "fla.ops.gla")
    return gla_chunk if ops is None else ops.chunk_gla


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


def gla_exact(q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, *, scale: float = 1.0) -> Tensor:
    """The definition, every pair of positions: what `gla_chunk` is tested against."""
    total = log_gate.cumsum(1)
    decay = (total[:, :, None] - total[:, None]).clamp(max=0).exp()
    scores = torch.einsum("bthd,btihd,bihd->bhti", q * scale, decay, k).tril()
    return torch.einsum("bhti,bihv->bthv", scores, v)


def _sequence(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    total = log_gate.cumsum(-2)
    o = _within(q, k, total) @ v
    last = total[..., -1:, :]
    added = (k * (last - total).exp()).mT @ v
    starts, state = carried(state, last.mT.exp(), added)
    return o + (q * total.exp()) @ starts, state


def _within(q: Tensor, k: Tensor, total: Tensor) -> Tensor:
    """Scores between positions of one chunk, `[..., chunk, chunk]`."""
    chunk = q.shape[-2]
    blocks = chunk // BLOCK
    q, k_block, total_block = (x.unflatten(-2, (blocks, BLOCK)) for x in (q, k, total))
    # What the gates have summed to before each block: read off, since a difference is rounded, and
    # where it came out above a sum before it the clamp below would take that gate's gradient away.
    start = F.pad(total, (0, 0, 1, 0))[..., :-1:BLOCK, :].unsqueeze(-2)
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
