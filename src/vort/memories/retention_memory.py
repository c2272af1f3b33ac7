"""Memories that are one call of `retention`: feature map, routing, padding, state."""

from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from vort.memories.interface import Memory, MemoryInputs, MemoryOutput, State
from vort.memories.router import Routing
from vort.ops.feature_maps import FEATURE_MAPS, FeatureMap, feature_map
from vort.ops.retention import (
    DEFAULT_EPS,
    NORMALIZERS,
    Normalizer,
    RetentionState,
    retention,
)

__all__ = ["RetentionMemory"]

# Features of either sign bring the normaliser near zero and need more than the op's default.
EPS_POSITIVE, EPS_SIGNED = DEFAULT_EPS, 1e-6


class RetentionMemory(Memory):
    """A memory of S decaying states for each head; subclasses say who writes and reads what.

    Args:
        num_heads: H.
        head_dim: D, of queries and keys.
        value_dim: V.
        features: name of a feature map, see `vort.ops.feature_maps`. The default is a learned one;
            the paper's, "favor", has no parameters and tells fewer keys apart (docs/results.md).
        num_features: its output dimension, where it is free; head_dim by default.
        normalizer: "decayed", "undecayed" or "none", see `retention`.
        include_self: whether a token may read what it writes.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        features: str = "hedgehog",
        num_features: int | None = None,
        normalizer: Normalizer = "decayed",
        include_self: bool = True,
    ) -> None:
        super().__init__()
        if normalizer not in NORMALIZERS:
            raise ValueError(
                f"normalizer must be one of {', '.join(NORMALIZERS)}, got {normalizer!r}"
            )
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.value_dim = head_dim if value_dim is None else value_dim
        self.normalizer: Normalizer = normalizer
        self.include_self = include_self
        self.key_map = _feature_map(features, head_dim, num_features, num_heads)
        # A learned map is one for queries and one for keys; any other must be the same for both.
        learned = any(True for _ in self.key_map.parameters())
        self.query_map = (
            _feature_map(features, head_dim, num_features, num_heads) if learned else None
        )

    @property
    @abstractmethod
    def terms(self) -> int:
        """S: states of each head."""

    @abstractmethod
    def route(self, inputs: MemoryInputs) -> Routing:
        """Who writes and reads how much of each time scale."""

    def forward(
        self, inputs: MemoryInputs, state: State | None = None, *, output_state: bool = False
    ) -> MemoryOutput:
        """What each position retrieves; see `Memory`."""
        routing = self.route(inputs)
        if self.query_map is None:
            # One map for all heads: keys that heads share are mapped once.
            inputs = replace(inputs, k=self.key_map(inputs.k)).with_all_heads()
        else:
            inputs = inputs.with_all_heads()
            inputs = replace(inputs, k=self.key_map(inputs.k))
        query_map = self.key_map if self.query_map is None else self.query_map
        normalized = self.normalizer != "none"
        q = query_map.map_query(inputs.q) if normalized else query_map(inputs.q)
        inputs = replace(inputs, q=q)
        output, after = self._retrieve(inputs, routing, state, output_state)
        return MemoryOutput(output, after, routing.order)

    def state_size(self, length: int = 0) -> int:
        """S matrices of features times values for each head, and what the normaliser needs."""
        features = self.key_map.output_dim
        sums = {"decayed": self.terms, "undecayed": 1, "none": 0}[self.normalizer]
        return self.num_heads * features * (self.terms * self.value_dim + sums)

    def _retrieve(
        self, inputs: MemoryInputs, routing: Routing, state: State | None, output_state: bool
    ) -> tuple[Tensor, State | None]:
        """`retention` such that padding neither writes nor ages the state."""
        padding = inputs.padding
        before = None if state is None else RetentionState(state["G"], state.get("b"))
        tensors: list[Tensor | None] = [inputs.q, inputs.k, inputs.v, routing.write, routing.read]
        if padding is None:
            return self._call(tensors, routing.log_decay, before, output_state, inputs.cu_seqlens)
        real = padding.real[..., None, None]
        if inputs.q.shape[1] == 1:
            output, after = self._call(tensors, routing.log_decay, before, output_state, None)
            return output * real, _only_where(padding.real[:, 0], after, state)
        if not output_state:
            # Tokens stand before padding: whatever happens to the state after them, none sees.
            return self._call(tensors, routing.log_decay, before, False, None)
        packed = [None if x is None else padding.pack(x) for x in tensors]
        output, after = self._call(packed, routing.log_decay, before, True, padding.cu_seqlens)
        return padding.unpack(output), after

    def _call(
        self,
        tensors: list[Tensor | None],
        log_decay: Tensor,
        before: RetentionState | None,
        output_state: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, State | None]:
        q, k, v, write, read = tensors
        assert q is not None
        assert k is not None
        assert v is not None
        assert write is not None
        output, after = retention(
            q,
            k,
            v,
            write,
            log_decay,
            read=read,
            normalizer=self.normalizer,
            include_self=self.include_self,
            initial_state=before,
            output_final_state=output_state,
            cu_seqlens=cu_seqlens,
            eps=EPS_POSITIVE if self.key_map.is_positive else EPS_SIGNED,
        )
        if after is None:
            return output, None
        return output, {"G": after.G} if after.b is None else {"G": after.G, "b": after.b}


def _feature_map(name: str, head_dim: int, num_features: int | None, num_heads: int) -> FeatureMap:
    """The map of a name; a learned one has weights for each head."""
    if name not in FEATURE_MAPS:
        raise ValueError(f"features must be one of {', '.join(FEATURE_MAPS)}, got {name!r}")
    if name == "hedgehog":
        # As many features as FAVOR+ has by default, hence the same state.
        return feature_map(name, head_dim, num_features or head_dim, num_heads=num_heads)
    return feature_map(name, head_dim, num_features)


def _only_where(real: Tensor, after: State | None, before: State | None) -> State | None:
    """The state after a token in rows that have one, the state before it in the others."""
    if after is None:
        return None

    def choose(name: str, x: Tensor) -> Tensor:
        old = torch.zeros_like(x) if before is None else before[name]
        return torch.where(real.reshape(-1, *[1] * (x.dim() - 1)), x, old)

    return {name: choose(name, x) for name, x in after.items()}
