"""Context parallel: sequences cut over ranks, each of which computes its part of every layer.

A layer exchanges two things. The last `sliding_window - 1 + conv_size - 1` hidden states go to the
next rank: enough for the keys and values that its first tokens attend to, which it computes again.
And the states that each rank's tokens leave in an empty memory are gathered once; decays are
constants, so what is left of them at another rank is known in closed form. Neither depends on the
length.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from vort.distributed.exchange import Chain, from_last, states_before, sum_over_ranks, with_halo
from vort.layers import LayerStates, VortAttention
from vort.layers.packing import Packing
from vort.layers.vort_attention import _Piece
from vort.memories import Memory, MemoryInputs, State
from vort.models import VortForCausalLM, VortModel
from vort.ops.custom import without_autocast
from vort.ops.padding import present
from vort.ops.retention.final import final_state
from vort.ops.short_convolution import computed_again

__all__ = ["Part", "context_parallel", "halo_size", "part_of"]

Model = TypeVar("Model", VortForCausalLM, VortModel)
_IGNORED = -100
# What a call may hold for each token, besides tokens themselves.
_ALONG = ("entity_mask", "shift_labels")
_PACKED = ("cu_seqlens", "position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k")


def context_parallel(model: Model, mesh: DeviceMesh) -> Model:
    """The same model, which from now on computes one part of every sequence on each rank of a mesh.

    Every rank calls it with the same whole batch, as a single process would: rows of any length,
    padded by `attention_mask`, or packed by cu_seqlens, position_ids or seq_idx, across the borders
    of ranks too. The loss is that of the whole batch, on every rank; gradients are each rank's own
    and must be averaged over the ranks of the mesh, as DDP and `fully_shard` do. Logits and hidden
    states are those of the rank's own tokens, see `part_of`; but `logits_to_keep=n` gives the last
    n of the whole sequence, so that `generate` reads a long prompt in parts and then decodes on
    every rank alike.

    Args:
        model: changed in place; before it is wrapped by DDP or `fully_shard`.
        mesh: of one dimension, such as `mesh["context"]`.
    """
    if mesh.ndim != 1:
        raise ValueError(
            f'mesh must have one dimension, such as mesh["context"], got {mesh.ndim}: '
            f"{mesh.mesh_dim_names}"
        )
    base = model.model if isinstance(model, VortForCausalLM) else model
    for block in base.layers:
        _check_memory(block.self_attn.memory)  # type: ignore[union-attr, arg-type]
    cutter = _Cutter(mesh.get_group(), halo_size(base))
    model.register_forward_pre_hook(cutter.before, with_kwargs=True)
    model.register_forward_hook(cutter.after, with_kwargs=True)
    return model


def halo_size(model: VortModel) -> int:
    """Hidden states of the rank before that a layer needs."""
    blocks: Any = model.layers
    window: int = max(block.self_attn.window for block in blocks)
    return max(window - 1, 0) + max(model.config.conv_size - 1, 0)


def _check_memory(memory: Memory) -> None:
    kinds = type(memory).__mro__
    # Who has a forward of his own must say that it heeds parts.
    declared = next(i for i, kind in enumerate(kinds) if "takes_parts" in vars(kind))
    defined = next(i for i, kind in enumerate(kinds) if "forward" in vars(kind))
    if not memory.takes_parts or declared > defined:
        from vort.memories import MEMORIES

        known = ", ".join(name for name, kind in MEMORIES.items() if kind.takes_parts)
        raise ValueError(
            f"context parallel needs a memory that hands on a state of fixed size ({known}), "
            f"got {type(memory).__name__}"
        )


@dataclass(frozen=True)
class Part:
    """One rank's part of the rows of a call.

    Attributes:
        chain: the ranks, and how sequences run through them.
        cuts: `[P + 1]` positions at which rows are cut.
        halo: positions of the rank before that a layer needs.
        bounds: of packed sequences in all of the row; None where every row is one sequence.
        made: bounds of this part on the device, once for all layers.
    """

    chain: Chain
    cuts: Sequence[int]
    halo: int
    bounds: Sequence[int] | None
    made: dict[int, Tensor] = field(default_factory=dict)

    @property
    def start(self) -> int:
        """The first position of this rank."""
        return self.cuts[self.chain.rank]

    @property
    def stop(self) -> int:
        """The position after its last."""
        return self.cuts[self.chain.rank + 1]

    @property
    def extra(self) -> int:
        """Positions before it that it computes again."""
        return self.halo if self.chain.rank else 0

    def take(self, x: Tensor) -> Tensor:
        """This rank's positions of `[B, T, ...]`."""
        return x[:, self.start : self.stop]

    def _within(self, start: int, device: torch.device) -> Tensor | None:
        """Bounds of packed sequences from `start` to the end of this part, counted from there."""
        if self.bounds is None:
            return None
        if start not in self.made:
            inner = [b - start for b in self.bounds if start < b < self.stop]
            self.made[start] = torch.tensor([0, *inner, self.stop - start], device=device)
        return self.made[start]

    def _last(self) -> int:
        """Where the last sequence of this part begins, counted from its start."""
        inner = [b for b in self.bounds or () if self.start < b < self.stop]
        return inner[-1] - self.start if inner else 0

    def attend(
        self,
        layer: VortAttention,
        norm: nn.Module | None,
        hidden_states: Tensor,
        delta: Tensor | None,
        states: LayerStates | None,
        entity: Tensor | None,
    ) -> tuple[Tensor, Tensor, None, Tensor | None]:
        """`VortAttention.after_norm` of this part; states are those after the last rank's."""
        total = hidden_states if delta is None else hidden_states + delta
        extended = with_halo(total if norm is None else norm(total), self.halo, self.chain.group)
        extra, device, keeps = self.extra, total.device, states is not None
        outer, inner = (self._within(self.start - n, device) for n in (extra, 0))
        piece = _Piece(extended, None, None, outer, keeps, False, None, None)
        after: dict[str, Tensor] = {}
        before = self._positions(layer, extended) if keeps else None
        _, x, heads, gate, along = layer._project(piece, before, after)
        if keeps and layer.window:
            after |= _ring(heads.turned_k, heads.near_v, layer.window, self.cuts[-1])

        def own(x: Tensor | None) -> Any:
            return None if x is None else x[:, extra:]

        if along is not None:
            along = along._replace(product=own(along.product))
        x, gate = own(x), own(gate)
        with computed_again(heads):
            local, entropy = layer._attend(heads, piece._replace(output_state=False), None, {})
            local = own(local)
            q, k, v = (own(y) for y in heads[:3])
            inputs = MemoryInputs(
                x,
                q,
                k,
                v,
                own(entropy),
                entity,
                cu_seqlens=inner,
                along=along,
                mapped=heads.mapped,
                part=self,
            )
            found = layer.memory(inputs, None, output_state=keeps)
        if states is not None:
            after |= {f"memory.{name}": value for name, value in (found.state or {}).items()}
            shared = {name: from_last(value, self.chain.group) for name, value in after.items()}
            states.store_state(layer.layer_idx, shared, self.cuts[-1])
        return total, layer._join(x, found.output, local, gate), None, found.order

    def _positions(self, layer: VortAttention, x: Tensor) -> State:
        """A state that says how many positions came before, for keys that are kept."""
        found = {"local.seen": torch.full((len(x),), self.start - self.extra, device=x.device)}
        if layer.convolution is not None:
            conv = layer.convolution
            found["conv"] = x.new_zeros(len(x), conv.size - 1, conv.channels)
        return found

    def retained_before(
        self, k: Tensor, v: Tensor, write: Tensor, log_decay: Tensor, normalizer: str
    ) -> State:
        """The state of `retention` before this part, from features, values and what is written."""
        last = self._last()
        given = (k[:, last:], v[:, last:], write[:, last:], log_decay)
        own = final_state(*given, normalizer=normalizer)
        # [1, H or 1, S, 1, 1]: nothing is sent for them, all lengths are known.
        rates = log_decay.to(own.G.dtype).expand(*([1] * (3 - log_decay.dim())), *log_decay.shape)
        per_token = {"G": rates[..., None, None], "b": rates[..., None]}
        if normalizer == "undecayed":
            per_token["b"] = torch.zeros_like(per_token["b"][..., :1, :])
        tensors = {"G": own.G} if own.b is None else {"G": own.G, "b": own.b}
        lengths = [stop - start for start, stop in pairwise(self.cuts)]
        logs = [per_token[name] for name in tensors]
        with torch.no_grad():
            known = [[log * length for log in logs] for length in lengths]
        return self._before(tensors, [log * lengths[self.chain.rank] for log in logs], known)

    def gated_before(self, k: Tensor, v: Tensor, log_gate: Tensor) -> State:
        """The state of gated linear attention before this part; its gates are sent along."""
        last = self._last()
        dtype = torch.float64 if k.dtype == torch.float64 else torch.float32
        k, v, gates = (x[:, last:].to(dtype) for x in (k, v, log_gate))
        total = gates.cumsum(1)
        left = (total[:, -1:] - total).exp()
        with without_autocast(k):
            own = torch.einsum("bthk,bthv->bhkv", k * left, v)
        return self._before({"G": own}, [total[:, -1].unsqueeze(-1)], None)

    def _before(
        self,
        own: Mapping[str, Tensor],
        logs: Sequence[Tensor],
        known: Sequence[Sequence[Tensor]] | None,
    ) -> State:
        found = states_before(self.chain, list(own.values()), known, logs)
        if self.bounds is not None:
            # All sequences but the first begin in this part.
            more = sum(self.start < b < self.stop for b in self.bounds)
            found = [torch.cat([x, x.new_zeros(more, *x.shape[1:])]) for x in found]
        return dict(zip(own, found, strict=True))


def part_of(length: int, mesh: DeviceMesh) -> slice:
    """The positions of rows of this length that fall to this rank, as even as can be.

    Of a batch that is padded or packed, all tokens laid end to end are one row.
    """
    cuts, rank = _cuts(length, mesh.size()), mesh.get_local_rank()
    return slice(cuts[rank], cuts[rank + 1])


def _cuts(length: int, ranks: int) -> list[int]:
    sizes = [length // ranks + (rank < length % ranks) for rank in range(ranks)]
    return [0, *accumulate(sizes)]


def _ring(k: Tensor, v: Tensor, window: int, length: int) -> State:
    """Keys and values of the last positions as `LocalState` keeps them: p in slot p mod window."""

    def ring(x: Tensor) -> Tensor:
        last = x[:, max(x.shape[1] - window, 0) :]
        last = nn.functional.pad(last, (0, 0, 0, 0, 0, window - last.shape[1]))
        return last.roll(length % window if length >= window else 0, 1)

    seen = torch.full((len(k),), length, dtype=torch.int64, device=k.device)
    return {"local.k": ring(k), "local.v": ring(v), "local.seen": seen}


class _Cutter:
    """Cuts what a model is called with, and puts together what it returns."""

    def __init__(self, group: dist.ProcessGroup, halo: int) -> None:
        self.group, self.halo = group, halo
        self.ranks = dist.get_world_size(group)

    def before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of `forward`, of this rank's part."""
        if kwargs.get("part") is not None:
            return None
        called = signature(model.forward).bind_partial(*args, **kwargs).arguments
        given = called.pop("kwargs", {}) | called
        rows = given.get("input_ids")
        rows = given.get("inputs_embeds") if rows is None else rows
        if rows is None or self._goes_on(given) or self._is_short(given, rows.shape[1]):
            return None
        if given.get("asked") is not None:
            raise ValueError("asked names places of whole rows, which are cut over ranks here")
        bounds = self._lay(given)
        rows = given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]
        part = self._part(rows.shape[1], bounds)
        targets = given.get("shift_labels")
        if targets is not None and given.get("num_items_in_batch") is None:
            given["num_items_in_batch"] = (targets != _IGNORED).sum()
        for name in ("input_ids", "inputs_embeds", *_ALONG):
            if given.get(name) is not None:
                given[name] = part.take(given[name])
        if bounds is not None:
            if given.get("use_cache"):
                raise ValueError("use_cache needs rows of one sequence each, all of one length")
            given["use_cache"] = False
        given["part"] = part
        return (), given

    def after(self, model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """The loss of the whole batch; the last logits of all where some are asked for."""
        if kwargs.get("part") is None:
            return None
        scored = kwargs.get("shift_labels") is not None
        # A tuple has no names: the loss is first, if there is one, and logits are next.
        loss, logits = (0, int(scored)) if isinstance(output, tuple) else ("loss", "logits")
        found: Any = list(output) if isinstance(output, tuple) else output
        if scored:
            found[loss] = sum_over_ranks(found[loss], self.group)
        if kwargs.get("logits_to_keep"):
            found[logits] = from_last(found[logits], self.group)
        return tuple(found) if isinstance(output, tuple) else found

    def _goes_on(self, given: Mapping[str, Any]) -> bool:
        """Whether the call goes on with a cache: every rank then does all of it."""
        states = given.get("past_key_values")
        return isinstance(states, LayerStates) and states.load_state(0) is not None

    def _is_short(self, given: Mapping[str, Any], length: int) -> bool:
        """Whether it is a prompt too short to share, of which only the last logits are wanted."""
        kept = given.get("logits_to_keep", 0)
        return isinstance(kept, int) and kept > 0 and length // self.ranks < max(self.halo, kept)

    def _lay(self, given: dict[str, Any]) -> list[int] | None:
        """Lay what is padded or packed end to end, in place; bounds of the sequences, if so.

        What a position is scored on stands beside it from here on, whichever rank has the next.
        """
        from vort.models.modeling_vort import _targets

        mask, kept = given.pop("attention_mask", None), given.get("logits_to_keep", 0)
        if not isinstance(kept, int):
            raise ValueError(
                "logits_to_keep must be a number where sequences are cut over ranks, "
                f"got {type(kept).__name__}"
            )
        targets = _targets(given.pop("labels", None), given.pop("shift_labels", None), mask)
        if targets is not None and kept:
            # The loss is that of the positions kept: the last of the whole, not of each rank.
            targets = targets.clone()
            targets[:, :-kept] = _IGNORED
        if targets is not None:
            given["shift_labels"] = targets
        rows = given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]
        batch, length = rows.shape[:2]
        mask = None if mask is None else present(mask, batch, length).bool()
        mask = None if mask is None or bool(mask.all()) else mask
        named = {name: given.pop(name, None) for name in _PACKED}
        packing = Packing.of(batch, length, mask, **named)
        if packing is None and mask is not None:
            packing = Packing.of_tokens(mask)
        if packing is None:
            return None
        if kept and packing.spread:
            raise ValueError(
                "logits_to_keep needs rows of one length, without padding, where sequences are cut "
                f"over ranks, got logits_to_keep={kept}"
            )
        for name in ("input_ids", "inputs_embeds", *_ALONG):
            if given.get(name) is not None:
                given[name] = packing.lay(given[name])
        return [int(b) for b in packing.bounds.tolist()]

    def _part(self, length: int, bounds: list[int] | None) -> Part:
        cuts, ranks = _cuts(length, self.ranks), self.ranks
        if length // ranks < max(self.halo, 1) and ranks > 1:
            raise ValueError(
                f"{length} tokens are too few for {ranks} ranks: each must have at least "
                f"{max(self.halo, 1)}, sliding_window - 1 and conv_size - 1 together"
            )
        starts = [0] if bounds is None else bounds
        joins = [cut not in starts for cut in cuts[:-1]]
        passes = [not any(low < b < high for b in starts) for low, high in pairwise(cuts)]
        return Part(Chain(self.group, joins, passes), cuts, self.halo, bounds)
