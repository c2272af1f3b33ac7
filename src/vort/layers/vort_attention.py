"""The VORT layer: retrieval from a power-law memory, plus attention to what is near."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vort.layers.at_once import attention_at_once
from vort.layers.cache import LayerStates
from vort.layers.packing import Packing, check_call
from vort.layers.parts import RMSNorm, ShortConvolution
from vort.memories import (
    MEMORIES,
    PAPER,
    Along,
    LayerSettings,
    Memory,
    MemoryInputs,
    MemoryOutput,
    State,
)
from vort.memories.retention_memory import RetentionMemory
from vort.memories.settings import check_meant, settings_of
from vort.ops.asked import Asked, linear_of_asked, norm_of_asked, pick
from vort.ops.linear import Norm, gated_norm_linear, is_bare, is_plain, is_watched, products
from vort.ops.local_attention.local import LocalState, attend_locally
from vort.ops.padding import Padding, check_no_past, pad_packed, present
from vort.ops.rms_norm import rms_norm
from vort.ops.short_convolution import Heads, computed_again, to_heads

__all__ = ["VortAttention"]

# Fewer rows than this are a step of decoding.
FEW = 64
_ARGUMENTS = ("attention_mask", "past_key_values", "use_cache", "cu_seqlens", "entity_mask")


class _Piece(NamedTuple):
    """One call's tokens, as the parts of the layer need them."""

    hidden_states: Tensor
    entity: Tensor | None
    padding: Padding | None
    cu_seqlens: Tensor | None
    output_state: bool
    in_place: bool
    delta: Tensor | None
    norm: Norm | None
    asked: Asked | None = None


class _Mixed(NamedTuple):
    """What a piece becomes: hidden states before their norm, output, state, orders."""

    hidden_states: Tensor
    output: Tensor
    state: State
    order: Tensor | None


class VortAttention(nn.Module):
    """VORT(x_t) = o_t + Attn_local(x_t) (eq. vort-layer): takes the place of attention in a block.

    Memory and local attention share their projections; RoPE turns queries and keys of the local
    part alone, since a memory is addressed by content.

    Args:
        settings: `LayerSettings`, or a `VortConfig`; as an alternative to **options.
        layer_idx: under which number states are kept in `past_key_values`.
        memory: the name of another memory than VORT's; or a `Memory` of one's own, whose settings
            are the layer's too.
        **options: settings by name, see `LayerSettings`.

    >>> layer = VortAttention(
    ...     hidden_size=64, num_attention_heads=4, sliding_window=16, horizon=1000
    ... )
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
        settings: LayerSettings | None = None,
        *,
        layer_idx: int = 0,
        memory: Memory | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        given: object = memory
        if not isinstance(given, Memory | str | None):
            shown = given.__name__ if isinstance(given, type) else type(given).__name__
            raise TypeError(f"memory must be a name or a Memory that is built, got {shown}")
        if isinstance(memory, str):
            options["memory"] = memory
        elif memory is not None and settings is None:
            settings = memory.settings
        s = settings_of("VortAttention", settings, options)
        if settings is None:
            check_meant(s, [s.memory])
        # First of all parts: what it draws at random comes before the projections.
        memory = memory if isinstance(memory, Memory) else MEMORIES[s.memory](s)
        heads, kv_heads, head_dim = s.head_sizes()
        theirs = memory.settings.hidden_size, *memory.settings.head_sizes()
        if theirs != (s.hidden_size, heads, kv_heads, head_dim):
            raise ValueError(
                "hidden_size, heads, key and value heads and head_dim must be those of the memory, "
                f"{theirs}, got {(s.hidden_size, heads, kv_heads, head_dim)}"
            )
        self.num_heads, self.num_key_value_heads, self.head_dim = heads, kv_heads, head_dim
        self.window, self.rope_base = s.sliding_window, s.rope_theta
        self.layer_idx = layer_idx

        def linear(size: int, to: int) -> nn.Linear:
            return nn.Linear(size, to, bias=s.attention_bias)

        def norm(wanted: bool) -> RMSNorm | None:
            return RMSNorm(head_dim, eps=s.rms_norm_eps) if wanted else None

        self.q_proj = linear(s.hidden_size, heads * head_dim)
        self.k_proj = linear(s.hidden_size, kv_heads * head_dim)
        self.v_proj = linear(s.hidden_size, kv_heads * head_dim)
        self.o_proj = linear(heads * head_dim, s.hidden_size)
        channels = (heads + 2 * kv_heads) * head_dim
        self.convolution = ShortConvolution(channels, s.conv_size) if s.conv_size else None
        self.q_norm, self.k_norm = norm(s.qk_norm), norm(s.qk_norm)
        self.norm = norm(s.output_norm)
        self.g_proj = linear(s.hidden_size, heads * head_dim) if s.output_gate else None
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
    def paper(cls, *, layer_idx: int = 0, **options: Any) -> "VortAttention":
        """The layer as the paper writes it (`vort.memories.PAPER`), but for the `options` given.

        What the paper leaves open (how many heads, the window, RoPE within it) is as elsewhere.

        >>> layer = VortAttention.paper(hidden_size=64, num_banks=4, num_scales=6)
        >>> layer.memory.num_scales  # (K - 1) S + 1: order 1 needs a single scale
        19
        """
        return cls(layer_idx=layer_idx, **{**PAPER, **options})

    def set_horizon(self, horizon: int) -> None:
        """Re-calibrate the memory for lags up to `horizon`; see `Router.set_horizon`."""
        self.memory.set_horizon(horizon)

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
        past_key_values: LayerStates | None = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
        entity_mask: Tensor | None = None,
        *,
        output_orders: bool = False,
        part: Any = None,
        **kwargs: Any,
    ) -> Any:
        """(output `[B, T, hidden_size]`, None), as attention layers return it.

        Args:
            hidden_states: `[B, T, hidden_size]`.
            attention_mask: `[B, T]`, or `[B, past + T]`: 0 at padding, which may be anywhere. It
                neither writes nor ages the memory; its output is 0.
            past_key_values: `LayerStates`, such as a `VortCache`; its state is continued, and
                replaced if `use_cache`.
            use_cache: whether to keep the state after the last token.
            cu_seqlens: `[N + 1]` bounds of N sequences packed into one row, B = 1. States then
                count sequences.
            entity_mask: `[B, T]`, or `[B, past + T]`: 1 at tokens of a named entity; for a memory
                that looks at it (`use_entity`).
            output_orders: return a third element, the orders `[B, T, H]` (None if the memory has
                none).
            part: where sequences are cut over processes, this one's part (`vort.distributed`).
            **kwargs: what callers of attention layers send besides (`vort.layers.packing`).
                `position_ids` that begin anew within a row, `seq_idx` and `cu_seq_lens_q` are
                packed sequences, as with cu_seqlens; others change nothing. What no caller sends
                is refused.
        """
        found: object = past_key_values
        if not isinstance(found, LayerStates | None):
            kind = type(found).__name__
            raise TypeError(f"past_key_values must be LayerStates (or a VortCache), got {kind}")
        before = None if past_key_values is None else past_key_values.load_state(self.layer_idx)
        batch, length = hidden_states.shape[:2]
        if entity_mask is not None:
            if not self.memory.needs_entity:
                raise ValueError("entity_mask needs a memory that looks at it: set use_entity=True")
            entity_mask = present(entity_mask, batch, length, "entity_mask")
        if attention_mask is not None and past_key_values is None:
            check_no_past(attention_mask, length)
        if cu_seqlens is not None or kwargs:
            check_call("VortAttention", kwargs, _ARGUMENTS)
            mask = None if attention_mask is None else present(attention_mask, batch, length)
            if cu_seqlens is not None and mask is not None:
                raise ValueError("give attention_mask or cu_seqlens, not both")
            packing = Packing.of(
                batch,
                length,
                mask,
                cu_seqlens=cu_seqlens,
                continues=before is not None,
                values=past_key_values is not None,
                **kwargs,
            )
            if packing is not None and cu_seqlens is not packing.bounds:
                options = (past_key_values, use_cache, entity_mask, output_orders)
                return self._packed(packing, hidden_states, mask, *options)
        given = (attention_mask, past_key_values, use_cache, cu_seqlens, entity_mask)
        wishes = {"output_orders": output_orders, "part": part}
        return self.after_norm(None, hidden_states, *given, **wishes)[1:]

    def after_norm(
        self,
        norm: RMSNorm | None,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: LayerStates | None = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
        entity_mask: Tensor | None = None,
        *,
        delta: Tensor | None = None,
        output_orders: bool = False,
        part: Any = None,
        asked: Asked | None = None,
    ) -> Any:
        """Hidden states + delta, then what `forward` returns for the norm of that.

        What else reads the sum should read the one that is returned: its gradients are added up
        where the norm's is made.

        asked: the only positions whose output is wanted, `[rows, hidden_size]` as `pick` has it; of
        whole sequences from their start, through projections without biases.
        """
        if use_cache and past_key_values is None:
            raise ValueError("use_cache=True needs past_key_values to keep the state in")
        beside = (attention_mask, past_key_values, cu_seqlens, part)
        if asked is not None and any(x is not None for x in beside):
            raise ValueError(
                "asked must be None beside a mask, states, cu_seqlens or a part: its positions are "
                "of whole sequences from their start"
            )
        if part is not None:
            kept = past_key_values if use_cache else None
            found = part.attend(self, norm, hidden_states, delta, kept, entity_mask)
            return found if output_orders else found[:3]
        first = None if norm is None else norm.fused()
        given = (attention_mask, past_key_values, entity_mask, asked)
        if type(self) is VortAttention and all(x is None for x in given):
            found = attention_at_once(self, first, hidden_states, delta, cu_seqlens)
            if found is not None:
                residual, output, order = found
                return residual, output, None, *[order] * output_orders
        length = hidden_states.shape[1]
        if delta is not None and (attention_mask is not None or cu_seqlens is not None):
            hidden_states, delta = hidden_states + delta, None
        residual = hidden_states
        if norm is not None and (attention_mask is not None or cu_seqlens is not None):
            hidden_states, first = norm(hidden_states), None
        mask, x = attention_mask, hidden_states
        stateful = cu_seqlens is not None and past_key_values is not None
        if cu_seqlens is not None and stateful:
            x, mask = pad_packed(hidden_states, cu_seqlens)
            if entity_mask is not None:
                entity_mask, _ = pad_packed(entity_mask, cu_seqlens)
        padding = Padding.of(mask, *x.shape[:2])
        if padding is not None:
            x = padding.align(x)
            entity_mask = None if entity_mask is None else padding.align(entity_mask)
        single = length == 1 and padding is None and cu_seqlens is None
        in_place = single and use_cache and getattr(past_key_values, "in_place", False)
        packed = None if stateful else cu_seqlens
        rest = (padding, packed, use_cache, in_place, delta, first, asked)
        piece = _Piece(x, entity_mask, *rest)
        before = None if past_key_values is None else past_key_values.load_state(self.layer_idx)
        self._check_states(before, x.shape[0])
        mixed = self._mix(piece, before)
        if use_cache and past_key_values is not None:
            past_key_values.store_state(self.layer_idx, mixed.state, length)
            if padding is not None or stateful:  # not read here, or torch.compile would ask of it
                past_key_values.padded = True

        def back(x: Tensor) -> Tensor:
            x = x if padding is None else padding.restore(x)
            return x[mask].unsqueeze(0) if stateful and mask is not None else x

        output = back(mixed.output)
        residual = residual if first is None else mixed.hidden_states
        if not output_orders:
            return residual, output, None
        return residual, output, None, None if mixed.order is None else back(mixed.order)

    def _check_states(self, state: State | None, rows: int) -> None:
        """Refuse those of more or fewer sequences, or of a layer with other parts."""
        if state is None:
            return
        held = next((len(x) for x in state.values()), rows)
        if held != rows:  # memories would repeat one for all
            raise ValueError(
                f"past_key_values must be of as many sequences as there are rows, {rows}, "
                f"got {held}"
            )
        has = ("local.seen" in state, "conv" in state)
        if has != (self.window > 0, self.convolution is not None):
            parts = ("a window" if has[0] else "no window", "a" if has[1] else "no")
            raise ValueError(
                f"past_key_values must be of this layer, got those of one with {parts[0]} and "
                f"{parts[1]} short convolution"
            )

    def _packed(
        self,
        packing: Packing,
        hidden_states: Tensor,
        mask: Tensor | None,
        past_key_values: LayerStates | None,
        use_cache: bool,
        entity_mask: Tensor | None,
        output_orders: bool,
    ) -> Any:
        """`forward` of rows that hold several sequences each."""
        shape = hidden_states.shape[0], hidden_states.shape[1]
        output, _, *orders = self(
            packing.lay(hidden_states),
            past_key_values=past_key_values,
            use_cache=use_cache,
            cu_seqlens=packing.bounds,
            entity_mask=None if entity_mask is None else packing.lay(entity_mask),
            output_orders=output_orders,
        )
        output = packing.back(output, shape)
        if mask is not None:
            output = output.masked_fill(~mask.bool()[..., None], 0)
        return output, None, *(None if x is None else packing.back(x, shape) for x in orders)

    def _mix(self, piece: _Piece, before: State | None) -> _Mixed:
        """One piece of every sequence."""
        padding = piece.padding
        after: dict[str, Tensor] = {}
        residual, x, heads, gate, along = self._project(piece, before, after)
        # Only here: nothing else keeps turned heads, and each tensor kept is asked about.
        with computed_again(heads):
            local, entropy = self._attend(heads, piece, before, after)
        q, k, v = heads[:3]
        rest = (entropy, piece.entity, padding, piece.cu_seqlens, piece.in_place, along)
        past = None if before is None else _below(before, "memory.")
        inputs = MemoryInputs(x, q, k, v, *rest, mapped=heads.mapped, asked=piece.asked)
        found: MemoryOutput = self.memory(inputs, past, output_state=piece.output_state)
        if piece.asked is None and found.output.shape[:3] != q.shape[:3]:
            raise ValueError(
                f"{type(self.memory).__name__} must give an output for each of "
                f"{list(q.shape[:3])} positions and heads, got {list(found.output.shape)}"
            )
        if piece.output_state and found.state is None and self.memory.keeps_state:
            raise ValueError(
                f"{type(self.memory).__name__} must give its state where output_state is asked "
                "for, or set keeps_state = False"
            )
        if found.state is not None:
            after.update({f"memory.{name}": value for name, value in found.state.items()})
        output = self._join(x, found.output, local, gate, piece.asked)
        if padding is not None:
            output = output.masked_fill(~padding.real[..., None], 0)
        return _Mixed(residual, output, after, found.order)

    def _join(
        self,
        x: Tensor,
        found: Tensor,
        local: Tensor | None,
        gate: Tensor | None,
        asked: Asked | None = None,
    ) -> Tensor:
        """The layer's output from what memory and local attention found."""
        if asked is not None:
            found = found if found.ndim == 3 else pick(found, asked)
            local = None if local is None else pick(local, asked)
        out_norm = self.norm
        known = out_norm is None or (type(out_norm) is RMSNorm and not is_watched(out_norm))
        if known and is_plain(x, self.o_proj):
            norm, eps = (None, 0.0) if self.norm is None else (self.norm.weight, self.norm.eps)
            options = {"other": local, "gate": gate, "norm": norm, "eps": eps}
            return gated_norm_linear(found, self.o_proj.weight, **options)  # type: ignore[arg-type]
        mixed = found if local is None else found + local
        early = None if asked is None or asked.late else asked
        if self.norm is not None and early is not None:
            mixed = norm_of_asked(mixed, *self.norm.fused(), early)
        elif self.norm is not None:
            mixed = self.norm(mixed)
        mixed = mixed.flatten(-2)
        mixed = mixed if gate is None else mixed * nn.functional.silu(gate)
        if early is not None:
            return linear_of_asked(mixed, self.o_proj.weight, early)
        output: Tensor = self.o_proj(mixed)
        return output

    def _project(
        self, piece: _Piece, before: State | None, after: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, Heads, Tensor | None, Along | None]:
        """Hidden states as they came, and normed; heads; output gate; what the memory asked for.

        The gate is that of positions asked for, where some are.
        """
        x, projections = piece.hidden_states, (self.q_proj, self.k_proj, self.v_proj)
        along, asked = None, piece.asked
        if is_plain(x, *projections, self.g_proj):
            groups = [[p.weight for p in projections]]
            gating = self.g_proj if asked is None else None
            if gating is not None:
                groups.append([gating.weight])
                if x.shape[0] * x.shape[1] < FEW:
                    # A product of few rows takes as long as a launch: one for all.
                    groups = [[*groups[0], *groups[1]]]
            along = self.memory.along(x)
            if along is not None:
                groups.append(along.weights)
            residual, x, first, *rest = products(x, *groups, delta=piece.delta, norm=piece.norm)
            if along is not None:
                along = along._replace(product=rest.pop())
            if gating is None:
                gate = self._gate(x, asked)
            else:
                size = gating.out_features
                first, gate = (first, rest[0]) if rest else (first[..., :-size], first[..., -size:])
            parts = [first]
        else:
            x = residual = x if piece.delta is None else x + piece.delta
            x = x if piece.norm is None else rms_norm(x, *piece.norm)
            if asked is not None and not asked.late and self._asks_alone():
                return residual, x, self._heads_of_asked(x, asked), self._gate(x, asked), None
            parts = [projection(x) for projection in projections]
            gate = self._gate(x, asked)
        heads = self._heads(parts, piece, before)
        if heads.state is not None:
            after["conv"] = heads.state
        return residual, x, heads, gate, along

    @property
    def has_plain_heads(self) -> bool:
        """Whether convolution and norms of heads are ours, and nobody watches: else all are called.

        Kernels take both norms or none, with one eps.
        """
        conv, q_norm, k_norm = self.convolution, self.q_norm, self.k_norm
        if conv is not None and (type(conv) is not ShortConvolution or is_watched(conv)):
            return False
        if q_norm is None or k_norm is None:
            return q_norm is k_norm
        ours = type(q_norm) is RMSNorm and type(k_norm) is RMSNorm and q_norm.eps == k_norm.eps
        return ours and not is_watched(q_norm, k_norm)

    def _heads(self, parts: list[Tensor], piece: _Piece, before: State | None) -> Heads:
        """Queries, keys and values from what the projections made of them, joined or three."""
        conv, norms, plain = self.convolution, (self.q_norm, self.k_norm), self.has_plain_heads
        lengths = None if piece.padding is None else piece.padding.lengths
        state = None if before is None or conv is None else before["conv"]
        options: dict[str, Any] = {
            "rope_base": self.rope_base if self.window else None,
            "seen": before["local.seen"] if before is not None and self.window else None,
            "cu_seqlens": piece.cu_seqlens,
        }
        if not plain:
            if conv is not None:
                joined = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
                kept = {"lengths": lengths, "output_state": piece.output_state}
                joined, state = conv(joined, state, cu_seqlens=piece.cu_seqlens, **kept)
                parts = [joined]
            counts = (self.num_heads, self.num_key_value_heads, self.num_key_value_heads)
            if len(parts) == 1:
                parts = list(parts[0].split([n * self.head_dim for n in counts], -1))
            parts = [
                x if norm is None else norm(x.unflatten(-1, (count, -1))).flatten(-2)
                for x, norm, count in zip(parts, (*norms, None), counts, strict=True)
            ]
            return to_heads(parts, *counts[:2], **options)._replace(state=state)
        q_norm, k_norm = norms
        return to_heads(
            parts,
            self.num_heads,
            self.num_key_value_heads,
            None if conv is None else conv.weight,
            state,
            q_norm=None if q_norm is None else q_norm.weight,
            k_norm=None if k_norm is None else k_norm.weight,
            eps=1e-6 if q_norm is None or q_norm.eps is None else q_norm.eps,
            # Heads that nothing turns are one for memory and window: these want no features.
            features=None if self.window and self.rope_base is None else self.memory.maps,
            lengths=lengths,
            output_state=piece.output_state,
            in_place=piece.in_place,
            **options,
        )

    def _gate(self, x: Tensor, asked: Asked | None) -> Tensor | None:
        """The output gate; of positions asked for alone, where some are."""
        if self.g_proj is None:
            return None
        gate: Tensor = self.g_proj(pick(x, asked) if asked is not None and asked.late else x)
        return gate if asked is None or asked.late else pick(gate, asked)

    def _asks_alone(self) -> bool:
        """Whether the memory alone looks at queries, and wants no others than those asked for."""
        if self.window or self.convolution is not None:
            return False
        norms = [norm for norm in (self.q_norm, self.k_norm) if norm is not None]
        known = isinstance(self.memory, RetentionMemory) and self.memory.takes_picked
        known = known and all(type(norm) is RMSNorm and not is_watched(norm) for norm in norms)
        return known and len(norms) != 1 and is_bare(self.q_proj)

    def _heads_of_asked(self, x: Tensor, asked: Asked) -> Heads:
        """`to_heads` with queries `[rows, H, D]` of some positions alone."""
        q = linear_of_asked(pick(x, asked), self.q_proj.weight, asked)
        k, v = (
            p(x).unflatten(-1, (self.num_key_value_heads, -1)) for p in (self.k_proj, self.v_proj)
        )
        q = q.unflatten(-1, (self.num_heads, -1))
        if self.q_norm is not None and self.k_norm is not None:
            eps = 1e-6 if self.q_norm.eps is None else self.q_norm.eps
            q = norm_of_asked(q, self.q_norm.weight, eps, asked)
            k = rms_norm(k, self.k_norm.weight, eps)
        return Heads(q, k, v, q, k, v, None)

    def _attend(
        self, heads: Heads, piece: _Piece, before: State | None, after: dict[str, Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Output and entropy of the local part; (None, None) without one."""
        if self.window == 0:
            return None, None
        padding = piece.padding
        output, entropy, state = attend_locally(
            heads.turned_q,
            heads.turned_k,
            heads.near_v,
            self.window,
            state=None if before is None else LocalState(**_below(before, "local.")),
            real=None if padding is None else padding.real,
            lengths=None if padding is None else padding.lengths,
            cu_seqlens=piece.cu_seqlens,
            return_entropy=self.memory.needs_entropy,
            output_state=piece.output_state,
            in_place=piece.in_place,
        )
        if state is not None:
            after.update({f"local.{name}": value for name, value in state._asdict().items()})
        return output, entropy


def _below(state: State, prefix: str) -> dict[str, Tensor]:
    """The entries whose names start with `prefix`, without it."""
    return {name[len(prefix) :]: x for name, x in state.items() if name.startswith(prefix)}
