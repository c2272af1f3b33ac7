"""Memories that are one call of `retention`: feature map, routing, gates, padding, state."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from vort.memories.interface import Memory, MemoryInputs, MemoryOutput, State
from vort.memories.settings import LayerSettings
from vort.ops.asked import Asked, pick
from vort.ops.feature_maps import FeatureMap, HedgehogFeatures, feature_map
from vort.ops.gpu.launcher import kernels_take
from vort.ops.linear import is_watched
from vort.ops.retention import DEFAULT_EPS, Normalizer, RetentionState, retention
from vort.ops.retention.chunk import AskedInputs, retention_of_asked
from vort.ops.retention.inputs import wants_grad

__all__ = [
    "GateProjection",
    "Gates",
    "RetentionMemory",
    "Routing",
    "SpreadReading",
    "WriteGain",
    "feature_maps",
    "widen",
    "without_queries",
    "write_gain",
]

_Route = TypeVar("_Route", bound=Callable[..., Any])

# Features of either sign bring the normaliser near zero and need more than the op's default.
EPS_SIGNED = 1e-6


def without_queries(route: _Route) -> _Route:
    """Mark a `RetentionMemory.route` that looks at no query: some of them alone may then be made.

    One that overrides it is not marked, and sees all.
    """
    route.without_queries = True  # type: ignore[attr-defined]
    return route


class Routing(NamedTuple):
    """How tokens use the memory.

    Attributes:
        write: `[B, T, H, S]`, how much each token writes to each scale.
        log_decay: `[S]` or `[H, S]`, log of what a scale keeps in one step.
        read: `[B, T, H, S]`, how much each query reads of each; None: all alike. Where
            `MemoryInputs.asked` are not picked late, it may be `[rows, H, S]` of those.
        order: `[B, T, H]`, the fractional order behind `write`; None where there is none.
    """

    write: Tensor
    log_decay: Tensor
    read: Tensor | None
    order: Tensor | None


class RetentionMemory(Memory):
    """A memory of S decaying states for each head; subclasses say who writes and reads what.

    Settings that all of them take: feature_map, num_features, normalizer, include_self.
    """

    takes_parts: ClassVar[bool] = True
    records_steps: ClassVar[bool] = True
    is_retention: ClassVar[bool] = True

    def __init__(self, settings: LayerSettings | None = None, **options: Any) -> None:
        super().__init__(settings, **options)
        self.normalizer = cast("Normalizer", self.settings.normalizer)
        self.include_self = self.settings.include_self
        self.key_map, self.query_map = feature_maps(self.settings)

    @property
    @abstractmethod
    def num_scales(self) -> int:
        """S: states of each head."""

    @property
    def eps(self) -> float:
        """What the normaliser has added: next to nothing, where features cannot cancel."""
        return DEFAULT_EPS if self.key_map.is_positive else EPS_SIGNED

    @property
    def maps(self) -> tuple[Tensor, Tensor] | None:
        """Of a learned map with weights for each head, unless someone watches it; see `Memory`."""
        query, key = self.query_map, self.key_map
        if type(query) is not HedgehogFeatures or type(key) is not HedgehogFeatures:
            return None
        replaced = any(type(m.weight) is not nn.Parameter for m in (query, key))
        watched = replaced or is_watched(self, query, key)
        # Keys that heads share are repeated before they are mapped; a forward of one's own maps.
        alone = self.num_key_value_heads == self.num_heads == key.num_heads
        known = type(self).forward is RetentionMemory.forward and alone and not watched
        return (query.weight, key.weight) if known else None

    @property
    def takes_picked(self) -> bool:
        """Whether queries may come as those alone that are asked for, `[rows, H, D]`."""
        kind, query = type(self), self.key_map if self.query_map is None else self.query_map
        known = kind.forward is RetentionMemory.forward
        known = known and kind._retrieve is RetentionMemory._retrieve
        known = known and kind._map is RetentionMemory._map
        known = known and getattr(kind.route, "without_queries", False)
        # A map that all heads share has a product of another shape.
        apart = not isinstance(query, HedgehogFeatures) or query.num_heads is not None
        return known and apart and not is_watched(self, query)

    @abstractmethod
    def route(self, inputs: MemoryInputs) -> Routing:
        """Who writes and reads how much of each scale."""

    def forward(
        self, inputs: MemoryInputs, state: State | None = None, *, output_state: bool = False
    ) -> MemoryOutput:
        """What each position retrieves; see `Memory`."""
        if type(self)._retrieve is not RetentionMemory._retrieve:
            # Whoever retrieves in a way of its own does so for all positions.
            inputs = replace(inputs, asked=None)
        asked = inputs.asked
        beside = (state, inputs.padding, inputs.cu_seqlens, inputs.part)
        if asked is not None and (output_state or any(x is not None for x in beside)):
            raise ValueError(
                "asked must be None beside states, padding, cu_seqlens or a part: its positions "
                "are of whole sequences from their start"
            )
        routing = self.route(inputs)
        inputs = inputs if inputs.mapped else self._map(inputs)
        if asked is not None and not asked.late:
            return MemoryOutput(self._answer(inputs, routing, asked), None, routing.order)
        if inputs.part is not None:
            given = (inputs.k, inputs.v, routing.write, routing.log_decay, self.normalizer)
            state = inputs.part.retained_before(*given)
        output, after = self._retrieve(inputs, routing, state, output_state)
        return MemoryOutput(output, after, routing.order)

    def _map(self, inputs: MemoryInputs) -> MemoryInputs:
        """The same with features of queries and keys, these and values for every head."""
        if self.query_map is None:
            # One map for all heads: keys that heads share are mapped once.
            inputs = replace(inputs, k=self.key_map(inputs.k)).with_all_heads()
        else:
            inputs = inputs.with_all_heads()
            inputs = replace(inputs, k=self.key_map(inputs.k))
        query_map = self.key_map if self.query_map is None else self.query_map
        normalized, asked = self.normalizer != "none", inputs.asked
        if asked is not None and not asked.late:
            return replace(inputs, q=query_map.map_asked(inputs.q, asked, normalized=normalized))
        q = query_map.map_query(inputs.q) if normalized else query_map(inputs.q)
        return replace(inputs, q=q)

    def state_size(self, length: int = 0) -> int:
        """S matrices of features times values for each head, and what the normaliser needs."""
        sums = {"decayed": self.num_scales, "undecayed": 1, "none": 0}[self.normalizer]
        return self.num_heads * self.key_map.output_dim * (self.num_scales * self.head_dim + sums)

    def log_decay(self, device: torch.device) -> Tensor:
        """Log of what each scale keeps in one step, `[S]` or `[H, S]`: it depends on no token."""
        hidden = torch.zeros(1, 1, self.settings.hidden_size, device=device)
        hidden = hidden.to(next((x.dtype for x in self.parameters()), hidden.dtype))
        q = hidden.new_zeros(1, 1, self.num_heads, self.head_dim)
        kv = hidden.new_zeros(1, 1, self.num_key_value_heads, self.head_dim)
        return self.route(MemoryInputs(hidden, q, kv, kv)).log_decay

    @torch.no_grad()
    def aged(self, state: State, steps: Tensor) -> State:
        """Every scale times what it keeps in so many steps; see `Memory`."""
        G = state["G"]
        rates = self.log_decay(G.device).double()
        kept = (steps.to(G.device).double()[:, None, None] * torch.atleast_2d(rates)).exp()
        found = {**state, "G": G * kept.to(G.dtype)[..., None, None]}
        # One row for all scales: a normaliser that does not decay.
        if "b" in state and self.normalizer == "decayed":
            found["b"] = state["b"] * kept.to(state["b"].dtype)[..., None]
        return found

    def _retrieve(
        self, inputs: MemoryInputs, routing: Routing, state: State | None, output_state: bool
    ) -> tuple[Tensor, State | None]:
        """`retention` such that padding neither writes nor ages the state."""
        padding = inputs.padding
        # Tokens stand before padding: whatever happens to the state after them, none sees.
        if padding is None or (inputs.q.shape[1] > 1 and not output_state):
            return self._call(inputs, routing, state, output_state)
        if inputs.q.shape[1] == 1:
            output, after = self._call(inputs, routing, state, output_state)
            real = padding.real[..., None, None]
            return output * real, _only_where(padding.real[:, 0], after, state)
        q, k, v, write = (padding.pack(x) for x in (inputs.q, inputs.k, inputs.v, routing.write))
        packed = replace(inputs, q=q, k=k, v=v, cu_seqlens=padding.cu_seqlens)
        read = None if routing.read is None else padding.pack(routing.read)
        output, after = self._call(packed, routing._replace(write=write, read=read), state, True)
        return padding.unpack(output), after

    def _answer(self, inputs: MemoryInputs, routing: Routing, asked: Asked) -> Tensor:
        """What some positions retrieve, of whole sequences from their start.

        Queries and reads may be those of all positions, or of these.
        """
        q, read = (
            x if x is None or x.ndim == 3 else pick(x, asked) for x in (inputs.q, routing.read)
        )
        assert q is not None
        tensors = (q, inputs.k, inputs.v, routing.write, routing.log_decay, read)
        tracked = wants_grad(*tensors)
        options: tuple[Any, ...] = (self.normalizer, self.include_self, self.eps, tracked)
        return retention_of_asked(AskedInputs(*tensors, *asked, *options))

    def _call(
        self, inputs: MemoryInputs, routing: Routing, state: State | None, output_state: bool
    ) -> tuple[Tensor, State | None]:
        """`retention` of features, its state as named tensors."""
        if inputs.in_place and state is not None and kernels_take(inputs.q, inputs.k, inputs.v):
            return self._step_in_place(inputs, routing, state), state
        output, after = retention(
            inputs.q,
            inputs.k,
            inputs.v,
            routing.write,
            routing.log_decay,
            read=routing.read,
            normalizer=self.normalizer,
            include_self=self.include_self,
            initial_state=None if state is None else RetentionState(state["G"], state.get("b")),
            output_final_state=output_state,
            cu_seqlens=inputs.cu_seqlens,
            eps=self.eps,
            asked=None if inputs.asked is None else inputs.asked.places,
        )
        if after is None:
            return output, None
        return output, {"G": after.G} if after.b is None else {"G": after.G, "b": after.b}

    def _step_in_place(self, inputs: MemoryInputs, routing: Routing, state: State) -> Tensor:
        """One token by the kernel of decoding, which moves the state on where it lies."""
        from vort.ops.retention.triton import retention_step_triton

        output: Tensor = retention_step_triton(
            RetentionState(state["G"], state.get("b")),
            inputs.q[:, 0],
            inputs.k[:, 0],
            inputs.v[:, 0],
            routing.write[:, 0],
            routing.log_decay,
            read=None if routing.read is None else routing.read[:, 0],
            normalizer=self.normalizer,
            include_self=self.include_self,
            eps=self.eps,
        )
        return output.unsqueeze(1)


class GateProjection(nn.Linear):
    """A linear layer of few outputs, which quantisers leave as it is.

    They take what is of type `nn.Linear` itself. A gate is too narrow for their blocks, holds next
    to none of a model's weights, and decides how long everything else is kept.
    """


class WriteGain(GateProjection):
    """A positive gain without a bound by which a token scales what it writes.

    One for each head, or with `write_gain="scale"` one for each head and scale; near 1 at first.

    >>> settings = LayerSettings(hidden_size=16, num_attention_heads=2, write_gain="scale")
    >>> WriteGain(settings, num_scales=8)(torch.randn(1, 5, 16)).shape
    torch.Size([1, 5, 2, 8])
    """

    # Beyond e^15 a token would lose all others to rounding, below e^-15 itself.
    LARGEST_LOG = 15.0

    def __init__(self, settings: LayerSettings, num_scales: int) -> None:
        self.scales = num_scales if settings.write_gain == "scale" else 1
        super().__init__(settings.hidden_size, settings.num_attention_heads * self.scales)
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[B, T, H, 1 or S]` for `[B, T, hidden_size]`."""
        logits: Tensor = widen(super().forward(hidden_states)).unflatten(-1, (-1, self.scales))
        return logits.clamp(-self.LARGEST_LOG, self.LARGEST_LOG).exp()


def write_gain(settings: LayerSettings, num_scales: int) -> WriteGain | None:
    """The gain that settings ask for."""
    return None if settings.write_gain == "none" else WriteGain(settings, num_scales)


class SpreadReading(GateProjection):
    """Logits of read weights, where each head begins at a time scale of its own.

    Heads begin from quick to slow, as their orders do: their logits are highest there, and lower
    by `SLOPE` for every scale away. Neither end of the scales is anybody's start: the quickest
    hold hardly more than the token itself, the slowest forgets nothing.
    """

    SLOPE = 0.7

    def __init__(self, size: int, heads: int, num_scales: int) -> None:
        self.heads = 0
        super().__init__(size, heads * num_scales)
        self.heads, self.num_scales = heads, num_scales
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Small weights, and biases around each head's scale."""
        if not self.heads:
            # Within `nn.Linear`: drawn as there, so that all else is drawn as without a start.
            super().reset_parameters()
            return
        nn.init.normal_(self.weight, std=0.02)
        with torch.no_grad():
            middle = (self.num_scales - 1) / 2
            ends = max(self.num_scales - 3.0, middle), min(1.0, middle)
            ends = ends if self.heads > 1 else (middle, middle)
            # A model may be laid out first, and get its weights later.
            device = self.bias.device
            own = torch.linspace(*ends, self.heads, device=device)
            away = (torch.arange(self.num_scales, device=device) - own[:, None]).abs()
            self.bias.copy_(-self.SLOPE * away.flatten())


class Gates(nn.Module):
    """What a token says about its own writing and reading.

    A write gate in (0, 1) for each head, and positive read weights over its S scales. Read weights
    are S · softmax: they average 1, and stay positive so that a normaliser made of them does. A
    common factor would cancel in that normaliser, so a softmax gives nothing away. Both start from
    a nearly constant value: every token half written, and each head reading around a time scale of
    its own, or all scales alike (`read_start`).

    Shapes: hidden states `[B, T, hidden_size]`; gate `[B, T, H]`, read `[B, T, H, S]`, both
    float32 (float64 for float64 inputs), None where settings switch them off.

    >>> gates = Gates(LayerSettings(hidden_size=16, num_attention_heads=2), num_scales=8)
    >>> gate, read = gates(torch.randn(1, 5, 16))
    >>> gate.shape, read.shape, torch.allclose(read.mean(-1), torch.ones(1, 5, 2))
    (torch.Size([1, 5, 2]), torch.Size([1, 5, 2, 8]), True)
    """

    def __init__(self, settings: LayerSettings, num_scales: int) -> None:
        super().__init__()
        size, heads = settings.hidden_size, settings.num_attention_heads
        self.num_heads = heads
        self.num_scales = num_scales
        self.write = GateProjection(size, heads) if settings.write_gate else None
        # One scale leaves nothing to weigh.
        weighs = settings.read_weights and num_scales > 1
        self.read: GateProjection | None = None
        if weighs and settings.reads_spread:
            self.read = SpreadReading(size, heads, num_scales)
        elif weighs:
            self.read = GateProjection(size, heads * num_scales)
        for projection in (self.write, self.read):
            if type(projection) is GateProjection:
                nn.init.normal_(projection.weight, std=0.02)
                nn.init.zeros_(projection.bias)

    def forward(
        self, hidden_states: Tensor, asked: Asked | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """(gate, read) for every token; read `[rows, H, S]` of those asked for, if not late."""
        early = None if asked is None or asked.late else asked
        return self.writing(hidden_states), self.reading(hidden_states, early)

    def writing(self, hidden_states: Tensor) -> Tensor | None:
        """The write gate alone, `[..., H]` for hidden states `[..., hidden_size]`."""
        if self.write is None:
            return None
        return torch.sigmoid(widen(self.write(hidden_states)))

    def reading(self, hidden_states: Tensor, asked: Asked | None = None) -> Tensor | None:
        """Read weights alone, `[..., H, S]`; of those asked for `[rows, H, S]`."""
        if self.read is None:
            return None
        logits = widen(self.read(hidden_states)).unflatten(-1, (self.num_heads, self.num_scales))
        logits = logits if asked is None else pick(logits, asked)
        return logits.softmax(-1) * self.num_scales


def widen(x: Tensor) -> Tensor:
    """At least float32: orders and weights in half precision would cost the kernel its shape."""
    return x if x.dtype == torch.float64 else x.float()


def feature_maps(settings: LayerSettings) -> tuple[FeatureMap, FeatureMap | None]:
    """The map of keys, and that of queries; None: the same.

    A learned map is one for queries and one for keys; any other must be the same for both.
    """
    key_map = _feature_map(settings)
    learned = any(True for _ in key_map.parameters())
    return key_map, _feature_map(settings) if learned else None


def _feature_map(settings: LayerSettings) -> FeatureMap:
    """The map of the settings; a learned one has weights for each head."""
    heads, _, head_dim = settings.head_sizes()
    if settings.feature_map == "hedgehog":
        # As many features as FAVOR+ has by default, hence the same state.
        num_features = settings.num_features or head_dim
        return feature_map("hedgehog", head_dim, num_features, num_heads=heads)
    return feature_map(settings.feature_map, head_dim, settings.num_features)


def _only_where(real: Tensor, after: State | None, before: State | None) -> State | None:
    """The state after a token in rows that have one, the state before it in the others."""
    if after is None:
        return None

    def choose(name: str, x: Tensor) -> Tensor:
        old = torch.zeros_like(x) if before is None else before[name]
        return torch.where(real.reshape(-1, *[1] * (x.dim() - 1)), x, old)

    return {name: choose(name, x) for name, x in after.items()}
