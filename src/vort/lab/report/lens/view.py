"""What every layer's memory did with a text: orders, writes, reads, features."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vort.memories import Routing
from vort.memories.interface import MemoryInputs
from vort.memories.retention_memory import RetentionMemory
from vort.ops.retention import retention
from vort.sessions import BareModel

if TYPE_CHECKING:
    from vort.models import VortForCausalLM

__all__ = ["LayerView", "TextView", "memory_in_words", "view_text"]

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class LayerView:
    """One layer's memory on T tokens, H heads first.

    The weight with which position t retrieves token i is
    `q[t]·k[i] Σ_s read[t, s] exp(-rates[s] (t - i)) gate[i] write[i, s] / denominator[t]`.

    Attributes:
        order: `[H, T]`, None where the memory has none.
        gate: `[H, T]`, None where tokens write in full.
        write: `[H, T, S]`, before the gate.
        read: `[H, T, S]`, None where all scales are read alike.
        rates: `[H, S]`.
        q: `[H, T, K]`, features of queries.
        k: `[H, T, K]`, features of keys.
        denominator: `[H, T]`, positive.
        include_self: whether a position reads its own token.
        shares: whether the weights of a position are shares that sum to 1.
    """

    order: Floats | None
    gate: Floats | None
    write: Floats
    read: Floats | None
    rates: Floats
    q: Floats
    k: Floats
    denominator: Floats
    include_self: bool
    shares: bool

    def weights(self, head: int, position: int) -> Floats:
        """How much one position retrieves of every token up to it, by scale: `[t + 1, S]`."""
        lag = position - np.arange(position + 1, dtype=np.float64)
        kept = np.exp(-self.rates[head].astype(np.float64) * lag[:, None])
        weights = kept * self.write[head, : position + 1]
        if self.gate is not None:
            weights *= self.gate[head, : position + 1, None]
        if self.read is not None:
            weights *= self.read[head, position]
        scores = self.k[head, : position + 1].astype(np.float64) @ self.q[head, position]
        weights *= scores[:, None] / self.denominator[head, position]
        if not self.include_self:
            weights[position] = 0
        found: Floats = weights.astype(np.float32)
        return found


@dataclass(frozen=True)
class TextView:
    """A text as a model holds it.

    Attributes:
        layers: what each memory did.
        surprise: `[T]`, bits of each token given those before it; NaN for the first.
    """

    layers: list[LayerView]
    surprise: Floats


@torch.no_grad()
def view_text(
    model: "VortForCausalLM | BareModel", input_ids: Tensor, entity_mask: Tensor | None = None
) -> TextView:
    """Run the model once over `input_ids` `[1, T]` and keep what its memories saw.

    Args:
        model: any whose memories retain: vort, uniform_power_law, exponential, mixture, linear;
            one without Hugging Face (`read_bare`) too.
        input_ids: one text.
        entity_mask: `[1, T]`, for models that use it.
    """
    base: Any = model.model
    memories = [block.self_attn.memory for block in base.layers]
    if not all(isinstance(memory, RetentionMemory) for memory in memories):
        found = memory_in_words(model)
        raise ValueError(
            "the lens shows memories with a retention kernel (vort, uniform_power_law, "
            f"exponential, mixture, linear), got a model with memory {found}"
        )
    views: list[LayerView] = []

    def keep(memory: Any, args: tuple[Any, ...]) -> None:
        views.append(_view_memory(memory, args[0]))

    last: list[Tensor] = []
    hooks = [memory.register_forward_pre_hook(keep) for memory in memories]
    # A model without Hugging Face has logits of the last token alone.
    hooks.append(base.norm.register_forward_hook(lambda norm, args, output: last.append(output)))
    cache = model.new_cache() if isinstance(model, BareModel) else None
    try:
        model(input_ids, past_key_values=cache, entity_mask=entity_mask, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    logits = model.lm_head(last[-1])[0]
    bits = torch.nn.functional.cross_entropy(
        logits[:-1].float(), input_ids[0, 1:].to(logits.device), reduction="none"
    ) / np.log(2)
    return TextView(views, np.append(np.float32(np.nan), bits.cpu().numpy()).astype(np.float32))


def memory_in_words(model: "VortForCausalLM | BareModel") -> str:
    """What the layers of a model remember with, in a line."""
    if isinstance(model, BareModel):  # of one memory
        return str(model.config.memory_of(0))
    return model.config.memory_in_words()


def _view_memory(memory: RetentionMemory, inputs: MemoryInputs) -> LayerView:
    routing = memory.route(inputs)
    every = inputs.with_all_heads()
    k = memory.key_map(every.k)
    query_map = memory.key_map if memory.query_map is None else memory.query_map
    q = query_map(every.q) if memory.normalizer == "none" else query_map.map_query(every.q)
    gates: Any = getattr(memory, "router", memory).gates
    gate, _ = gates(inputs.hidden_states)
    write = routing.write
    if gate is not None:
        write = write / gate.clamp_min(1e-30).unsqueeze(-1)
    heads, scales = write.shape[2:]
    return LayerView(
        order=None if routing.order is None else _heads_first(routing.order),
        gate=None if gate is None else _heads_first(gate),
        write=_heads_first(write),
        read=None if routing.read is None else _heads_first(routing.read),
        rates=(-routing.log_decay).expand(heads, scales).float().cpu().numpy(),
        q=_heads_first(q),
        k=_heads_first(k),
        denominator=_heads_first(_denominator(memory, q, k, routing)),
        include_self=memory.include_self,
        shares=memory.normalizer == "decayed" and memory.key_map.is_positive,
    )


def _denominator(memory: RetentionMemory, q: Tensor, k: Tensor, routing: Routing) -> Tensor:
    """What retrieved sums are divided by, `[1, T, H]`: retention of ones gives the sum itself."""
    if memory.normalizer == "none":
        return torch.ones_like(q[..., 0])
    write, log_decay, read = routing.write, routing.log_decay, routing.read
    if memory.normalizer == "undecayed":
        write, log_decay, read = torch.ones_like(write[..., :1]), log_decay.new_zeros(1), None
    total, _ = retention(
        q,
        k,
        torch.ones_like(q[..., :1]),
        write,
        log_decay,
        read=read,
        normalizer="none",
        include_self=memory.include_self,
    )
    return total[..., 0].abs() + memory.eps


def _heads_first(x: Tensor) -> Floats:
    """`[1, T, H, ...]` as a float32 array `[H, T, ...]`."""
    array: Floats = x[0].transpose(0, 1).float().contiguous().cpu().numpy()
    return array
