"""The VORT layer: retrieval from a power-law memory, plus attention to what is near."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vort.layers.cache import StateStore
from vort.layers.norm import RMSNorm
from vort.layers.short_convolution import ShortConvolution
from vort.memories.interface import Memory, MemoryInputs, MemoryOutput, State
from vort.memories.vort_memory import VortMemory
from vort.ops.local_attention.local import LocalState, attend_locally
from vort.ops.padding import Padding, pad_packed

__all__ = ["VortAttention"]


class _Piece(NamedTuple):
    """One call's tokens, as the parts of the layer need them."""

    hidden_states: Tensor
    entity: Tensor | None
    padding: Padding | None
    cu_seqlens: Tensor | None
    output_state: bool


class VortAttention(nn.Module):
    """VORT(x_t) = o_t + Attn_local(x_t) (eq. vort-layer): takes the place of attention in a block.

    Memory and local attention share their projections; RoPE turns queries and keys of the local
    part alone, since a memory is addressed by content.

    Args:
        hidden_size: size of hidden states in and out.
        num_heads: query heads.
        num_key_value_heads: key and value heads, a divisor of num_heads, which is the default.
        head_dim: size of a head; hidden_size / num_heads by default.
        window: positions that local attention sees, the current one included; 0: no local part.
        rope_base: base of RoPE in the local part; None: no RoPE.
        conv_size: positions of the short convolution after the projections; 0: none.
        qk_norm: RMS norm of each head's queries and keys. Similarities then differ from the first
            step on, where products of small vectors are all alike, and cannot run away later.
        output_norm: RMS norm of each head before the output projection.
        output_gate: multiply heads by silu of a further projection of the hidden states.
        bias: biases in the projections.
        norm_eps: eps of the norm.
        layer_idx: under which number states are kept in `past_key_values`.
        memory: another `Memory` than VORT's (see `vort.memories`); then no memory_options.
        **memory_options: arguments of `VortMemory`: routing, horizon, terms, tolerance, banks,
            order_min, order_start, use_entropy, use_entity, write_gate, read_weights, features,
            num_features, normalizer, include_self.

    >>> layer = VortAttention(hidden_size=64, num_heads=4, window=16, horizon=1000)
    >>> x = torch.randn(2, 100, 64)
    >>> y, _ = layer(x)
    >>> from vort.layers import LayerStates
    >>> states = LayerStates()
    >>> first, _ = layer(x[:, :70], past_key_values=states, use_cache=True)
    >>> rest, _ = layer(x[:, 70:], past_key_values=states, use_cache=True)
    >>> torch.allclose(torch.cat([first, rest], 1), y, atol=1e-4)
    True
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        window: int = 128,
        rope_base: float | None = 10000.0,
        conv_size: int = 4,
        qk_norm: bool = True,
        output_norm: bool = True,
        output_gate: bool = False,
        bias: bool = False,
        norm_eps: float = 1e-6,
        layer_idx: int = 0,
        memory: Memory | None = None,
        **memory_options: Any,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if num_key_value_heads is None else num_key_value_heads
        head_dim = hidden_size // num_heads if head_dim is None else head_dim
        _check_sizes(hidden_size, num_heads, kv_heads, head_dim, window, conv_size)
        if memory is not None and memory_options:
            raise ValueError(f"memory is given, so these have no use: {sorted(memory_options)}")
        self.hidden_size, self.num_heads, self.num_key_value_heads = (
            hidden_size,
            num_heads,
            kv_heads,
        )
        self.head_dim = head_dim
        self.window = window
        self.rope_base = rope_base
        self.layer_idx = layer_idx
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=bias)
        channels = (num_heads + 2 * kv_heads) * head_dim
        self.convolution = ShortConvolution(channels, conv_size) if conv_size else None
        self.q_norm = RMSNorm(head_dim, eps=norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps=norm_eps) if qk_norm else None
        self.norm = RMSNorm(head_dim, eps=norm_eps) if output_norm else None
        gate_size = num_heads * head_dim
        self.g_proj = nn.Linear(hidden_size, gate_size, bias=bias) if output_gate else None
        if memory is None:
            memory = VortMemory(hidden_size, num_heads, head_dim, **memory_options)
        self.memory = memory
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start every key head from the weights of the first query head it serves.

        A token then finds its like before anything is learned. From unrelated weights a small model
        spends most of its training on that, and may never find it at long lags. Projections have
        drawn their own weights by now; those that were loaded stay.
        """
        queries, keys = self.q_proj.weight, self.k_proj.weight
        if getattr(keys, "_is_hf_initialized", False) or keys.is_meta:
            return
        heads = queries.unflatten(0, (self.num_heads, self.head_dim))
        first = heads[:: self.num_heads // self.num_key_value_heads]
        keys.copy_(first.flatten(0, 1))

    @classmethod
    def paper(
        cls,
        hidden_size: int,
        num_heads: int = 1,
        *,
        banks: int = 10,
        terms: int = 15,
        num_features: int = 64,
        horizon: int = 10000,
        window: int = 128,
        **options: Any,
    ) -> "VortAttention":
        """The layer as the paper writes it, further `options` as in the constructor.

        K banks of fixed orders with S Gauss-Legendre terms each (corrected, see docs/errata.md),
        routed by hidden state, entropy and entity indicator; FAVOR+ features; a decayed
        normaliser; no read weights, gates, convolution or norm. What the paper leaves open (how
        many heads, the window, RoPE within it) is as elsewhere.

        >>> layer = VortAttention.paper(64, banks=4, terms=6, num_features=32)
        >>> layer.memory.terms  # (K - 1) S + 1: order 1 needs a single term
        19
        """
        settings: dict[str, Any] = {
            "routing": "banks",
            "banks": banks,
            "terms": terms,
            "features": "favor",
            "num_features": num_features,
            "horizon": horizon,
            "window": window,
            "use_entropy": True,
            "use_entity": True,
            "write_gate": False,
            "read_weights": False,
            "conv_size": 0,
            "qk_norm": False,
            "output_norm": False,
            "output_gate": False,
        }
        return cls(hidden_size, num_heads, **{**settings, **options})

    def set_horizon(self, horizon: int) -> None:
        """Re-calibrate the memory for lags up to `horizon`; see `Router.set_horizon`."""
        if not isinstance(self.memory, VortMemory):
            kind = type(self.memory).__name__
            raise TypeError(f"set_horizon needs a VortMemory, this layer has a {kind}")
        self.memory.router.set_horizon(horizon)

    def state_size(self, length: int = 0) -> int:
        """Numbers kept for one sequence after `length` tokens: memory, window and convolution."""
        per_position = 2 * self.num_key_value_heads * self.head_dim
        conv = self.convolution
        kept = 0 if conv is None else (conv.size - 1) * conv.channels
        return self.memory.state_size(length) + self.window * per_position + kept

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: StateStore | None = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
        entity_mask: Tensor | None = None,
        *,
        output_orders: bool = False,
        **kwargs: Any,
    ) -> Any:
        """(output `[B, T, hidden_size]`, None), as attention layers return it.

        Args:
            hidden_states: `[B, T, hidden_size]`.
            attention_mask: `[B, T]`, or `[B, past + T]`: 0 at padding, which may be anywhere. It
                neither writes nor ages the memory; its output is 0.
            past_key_values: a `VortCache`, or `LayerStates`; its state is continued, and replaced
                if `use_cache`.
            use_cache: whether to keep the state after the last token.
            cu_seqlens: `[N + 1]` bounds of N sequences packed into one row, B = 1. States then
                count sequences.
            entity_mask: `[B, T]`, 1 at tokens of a named entity.
            output_orders: return a third element, the orders `[B, T, H]` (None if the memory has
                none).
            **kwargs: ignored, for the sake of callers that know other attention layers.
        """
        if use_cache and past_key_values is None:
            raise ValueError("use_cache=True needs past_key_values to keep the state in")
        length = hidden_states.shape[1]
        mask, rows = attention_mask, hidden_states
        if cu_seqlens is not None and attention_mask is not None:
            raise ValueError("give attention_mask or cu_seqlens, not both")
        stateful = cu_seqlens is not None and past_key_values is not None
        if cu_seqlens is not None and stateful:
            rows, mask = pad_packed(hidden_states, cu_seqlens)
            if entity_mask is not None:
                entity_mask, _ = pad_packed(entity_mask, cu_seqlens)
        padding = Padding.of(mask, *rows.shape[:2])
        if padding is not None:
            rows = padding.align(rows)
            entity_mask = None if entity_mask is None else padding.align(entity_mask)
        piece = _Piece(rows, entity_mask, padding, None if stateful else cu_seqlens, use_cache)
        before = None if past_key_values is None else past_key_values.load_state(self.layer_idx)
        output, after, order = self._mix(piece, before)
        if use_cache and past_key_values is not None:
            past_key_values.store_state(self.layer_idx, after, length)

        def back(x: Tensor) -> Tensor:
            x = x if padding is None else padding.restore(x)
            return x[mask].unsqueeze(0) if stateful and mask is not None else x

        output = back(output)
        if not output_orders:
            return output, None
        return output, None, None if order is None else back(order)

    def _mix(self, piece: _Piece, before: State | None) -> tuple[Tensor, State, Tensor | None]:
        """Output, state and orders of one piece of every sequence."""
        x, padding = piece.hidden_states, piece.padding
        after: dict[str, Tensor] = {}
        q, k, v = self._project(piece, before, after)
        local, entropy = self._attend(q, k, v, piece, before, after)
        inputs = MemoryInputs(x, q, k, v, entropy, piece.entity, padding, piece.cu_seqlens)
        memory_state = None if before is None else _below(before, "memory.")
        found: MemoryOutput = self.memory(inputs, memory_state, output_state=piece.output_state)
        if found.state is not None:
            after.update({f"memory.{name}": value for name, value in found.state.items()})
        mixed = found.output if local is None else found.output + local
        if self.norm is not None:
            mixed = self.norm(mixed)
        mixed = mixed.flatten(2)
        if self.g_proj is not None:
            mixed = mixed * nn.functional.silu(self.g_proj(x))
        output = self.o_proj(mixed)
        if padding is not None:
            output = output.masked_fill(~padding.real[..., None], 0)
        return output, after, found.order

    def _project(
        self, piece: _Piece, before: State | None, after: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[B, T, H, D]`, keys and values `[B, T, Hkv, D]`."""
        x = piece.hidden_states
        parts = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        if self.convolution is not None:
            sizes = [part.shape[-1] for part in parts]
            joined, state = self.convolution(
                torch.cat(parts, -1),
                None if before is None else before["conv"],
                lengths=None if piece.padding is None else piece.padding.lengths,
                cu_seqlens=piece.cu_seqlens,
                output_state=piece.output_state,
            )
            if state is not None:
                after["conv"] = state
            parts = list(joined.split(sizes, -1))
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        piece: _Piece,
        before: State | None,
        after: dict[str, Tensor],
    ) -> tuple[Tensor | None, Tensor | None]:
        """Output and entropy of the local part; (None, None) without one."""
        if self.window == 0:
            return None, None
        padding = piece.padding
        output, entropy, state = attend_locally(
            q,
            k,
            v,
            self.window,
            rope_base=self.rope_base,
            state=None if before is None else LocalState(**_below(before, "local.")),
            real=None if padding is None else padding.real,
            lengths=None if padding is None else padding.lengths,
            cu_seqlens=piece.cu_seqlens,
            return_entropy=isinstance(self.memory, VortMemory) and self.memory.router.use_entropy,
            output_state=piece.output_state,
        )
        if state is not None:
            after.update({f"local.{name}": value for name, value in state._asdict().items()})
        return output, entropy


def _below(state: State, prefix: str) -> dict[str, Tensor]:
    """The entries whose names start with `prefix`, without it."""
    return {name[len(prefix) :]: x for name, x in state.items() if name.startswith(prefix)}


def _check_sizes(
    hidden_size: int, num_heads: int, kv_heads: int, head_dim: int, window: int, conv_size: int
) -> None:
    if num_heads < 1 or head_dim < 1:
        raise ValueError(
            f"num_heads and head_dim must be at least 1, got {num_heads} and {head_dim} "
            f"(hidden_size {hidden_size})"
        )
    if kv_heads < 1 or num_heads % kv_heads:
        raise ValueError(f"num_key_value_heads must divide num_heads = {num_heads}, got {kv_heads}")
    if window < 0:
        raise ValueError(f"window must be at least 1, or 0 for no local attention, got {window}")
    if conv_size < 0 or conv_size == 1:
        raise ValueError(f"conv_size must be at least 2, or 0 for no convolution, got {conv_size}")
