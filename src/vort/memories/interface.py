"""The interface that VORT and every rival memory share."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from vort.memories.settings import LayerSettings, settings_of
from vort.ops.asked import Asked
from vort.ops.padding import Padding

__all__ = ["Along", "Memory", "MemoryInputs", "MemoryOutput", "State", "StepWeights"]

State = Mapping[str, Tensor]
"""What a memory keeps between calls: named tensors whose first axis counts sequences."""


class Along(NamedTuple):
    """A product that a layer takes for its memory, along with its own projections.

    Attributes:
        weights: `[out, hidden_size]` each, to be multiplied by the hidden states as one.
        rest: what the memory wants back with the product.
        product: `[B, T, sum of out]`, once it is there.
    """

    weights: list[Tensor]
    rest: tuple[Tensor, ...] = ()
    product: Tensor | None = None


@dataclass(frozen=True)
class MemoryInputs:
    """What a layer hands to its memory.

    Attributes:
        hidden_states: `[B, T, hidden_size]`.
        q: `[B, T, H, D]`.
        k: `[B, T, Hkv, D]`, H a multiple of Hkv.
        v: `[B, T, Hkv, V]`.
        entropy: `[B, T, H]` of the layer's local attention, or None.
        entity: `[B, T]`, 1 within a named entity, or None.
        padding: where the tokens are, if some rows are padded; they stand at the front of rows.
        cu_seqlens: `[N + 1]` bounds of packed sequences with B = 1; then no state is involved.
        in_place: the state is the memory's to overwrite: a step of decoding into fixed buffers.
        along: what `Memory.along` asked for, with its product.
        mapped: q and k went through the memory's maps (`Memory.maps`) before they came.
        part: where sequences are cut over processes, this one's part (`vort.distributed`): what
            stands before it is asked for the state that others' tokens left.
        asked: the only positions whose output will be looked at; a memory may give these alone, see
            `MemoryOutput`, or all, of which others may be 0.
    """

    hidden_states: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    entropy: Tensor | None = None
    entity: Tensor | None = None
    padding: Padding | None = None
    cu_seqlens: Tensor | None = None
    in_place: bool = False
    along: Along | None = None
    mapped: bool = False
    part: Any = None
    asked: Asked | None = None

    @property
    def positions(self) -> tuple[int, int, int]:
        """B, T and H, whether queries are those of all positions or of some."""
        return *self.k.shape[:2], self.q.shape[-2]

    def with_all_heads(self) -> "MemoryInputs":
        """The same with keys and values repeated for every query head."""
        repeats = self.positions[2] // self.k.shape[2]
        if repeats == 1:
            return self
        k, v = (x.repeat_interleave(repeats, 2) for x in (self.k, self.v))
        return replace(self, k=k, v=v)

    def at(self, position: int) -> "MemoryInputs":
        """The inputs of one position, still with an axis of time."""

        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[:, position : position + 1]

        hidden, q, k, v = (
            x[:, position : position + 1] for x in (self.hidden_states, self.q, self.k, self.v)
        )
        rest = (cut(self.entropy), cut(self.entity))
        return MemoryInputs(hidden, q, k, v, *rest, mapped=self.mapped)


@dataclass(frozen=True)
class MemoryOutput:
    """What a memory gives back.

    Attributes:
        output: `[B, T, H, V]`, what was retrieved; or `[rows, H, V]` at `MemoryInputs.asked`, as
            `vort.ops.asked.pick` has them.
        state: what to pass to the next call, where asked for.
        order: `[B, T, H]`, fractional orders, where the memory has them.
    """

    output: Tensor
    state: State | None = None
    order: Tensor | None = None


class StepWeights(NamedTuple):
    """What kernels take of a memory with orders: those of a step of decoding, or a layer at once.

    Attributes:
        q_map: `[H, D, M]`, weight of the queries' learned map.
        k_map: the same of the keys'.
        weights: `[N, hidden_size]` of the logits: orders, then write gate, read weights and gains
            if any.
        order_bias: `[H]`.
        write_bias: `[H]`; None without a write gate.
        read_bias: `[H S]`; None without read weights.
        gain_bias: `[H]` or `[H S]`; None without a gain.
        mix: `[H, H]`, the orders' weight of the entropies; None where they see none.
        polynomials: `[S, degree + 1]` of the basis, float32.
        log_decay: `[S]` float32.
        order_min: the lowest order.
        normalizer: see `retention`.
        include_self: whether a token reads what it writes itself.
        eps: of the normaliser.
    """

    q_map: Tensor
    k_map: Tensor
    weights: list[Tensor]
    order_bias: Tensor
    write_bias: Tensor | None
    read_bias: Tensor | None
    gain_bias: Tensor | None
    mix: Tensor | None
    polynomials: Tensor
    log_decay: Tensor
    order_min: float
    normalizer: str
    include_self: bool
    eps: float


class Memory(nn.Module, ABC):
    """Retrieves from the past of each head: `forward` for sequences, `step` for one token.

    Subclasses differ in what they keep and for how long; projections, local attention, padding and
    caching are the layer's (`VortAttention`), so that comparisons compare memories alone.

    Args:
        settings: of the layer, each memory takes what concerns it; a `VortConfig` will do.
        **options: or settings by name, see `LayerSettings`.
    """

    keeps_state: ClassVar[bool] = True
    """Whether a state stands for the past; without one a memory scores whole sequences only."""
    takes_parts: ClassVar[bool] = False
    """Whether sequences may be cut over processes: `forward` then heeds `MemoryInputs.part`."""
    records_steps: ClassVar[bool] = False
    """Whether a step of decoding is the same launches every time, into states of fixed size."""
    is_retention: ClassVar[bool] = False
    """Whether it calls `retention` alone: prompts are recorded too, and states may be narrow."""

    def __init__(self, settings: LayerSettings | None = None, **options: Any) -> None:
        super().__init__()
        self.settings = settings_of(type(self).__name__, settings, options)
        self.num_heads, self.num_key_value_heads, self.head_dim = self.settings.head_sizes()

    def step_weights(self, x: Tensor) -> StepWeights | None:
        """What kernels need to route and retrieve, past the memory, for hidden states like x.

        None: they know no such memory; it is called.
        """
        return None

    @property
    def needs_entropy(self) -> bool:
        """Whether the layer must compute the entropy of its local attention."""
        return False

    @property
    def needs_entity(self) -> bool:
        """Whether it looks at the entity indicator; a layer refuses one that nobody looks at."""
        return False

    def along(self, x: Tensor) -> Along | None:
        """Weights whose product with hidden states like x the layer should take; None: none."""
        return None

    @property
    def maps(self) -> tuple[Tensor, Tensor] | None:
        """Weights `[H, D, M]` of the learned maps of queries and of keys, for who has the heads.

        A layer may apply them as it makes the heads, and say so by `MemoryInputs.mapped`. None: the
        memory wants to see the heads themselves.
        """
        return None

    @abstractmethod
    def forward(
        self, inputs: MemoryInputs, state: State | None = None, *, output_state: bool = False
    ) -> MemoryOutput:
        """What each position retrieves, its own token included, and the state after the last."""

    @torch.no_grad()
    def step(self, inputs: MemoryInputs, state: State | None = None) -> MemoryOutput:
        """What one token (T = 1) retrieves, and the state after it."""
        if inputs.q.shape[1] != 1:
            raise ValueError(f"step takes one position, got {inputs.q.shape[1]}")
        result: MemoryOutput = self(inputs, state, output_state=True)
        return result

    @abstractmethod
    def state_size(self, length: int = 0) -> int:
        """How many numbers are kept for one sequence after `length` tokens."""

    def aged(self, state: State, steps: Tensor) -> State:
        """The state after steps `[N]` more tokens in each row that write nothing.

        Where decays are constants that is a factor for each scale, however many steps there are,
        and states of several texts add up.
        """
        kind = type(self).__name__
        raise TypeError(f"states age only by constant decays, and {kind} has none")

    def set_horizon(self, horizon: int) -> None:
        """Re-calibrate the kernels for lags up to `horizon`, where they are made for one."""
        kind = type(self).__name__
        raise TypeError(f"set_horizon needs a memory with orders (VortMemory), got {kind}")
