"""Where layers keep their states between calls, with or without Hugging Face around."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from vort.memories.interface import State

__all__ = ["LayerStates", "StateStore"]


class StateStore(Protocol):
    """What a layer needs of `past_key_values`."""

    def load_state(self, layer_idx: int) -> State | None:
        """The state of a layer, or None before its first call."""
        ...

    def store_state(self, layer_idx: int, state: State, positions: int) -> None:
        """Keep the state of a layer after `positions` more columns, padding included."""
        ...


class LayerStates:
    """States by layer: the smallest `past_key_values` that a `VortAttention` can work with.

    >>> states = LayerStates()
    >>> states.load_state(0) is None
    True
    >>> states.store_state(0, {"seen": torch.tensor([3, 3])}, positions=3)
    >>> states.select(torch.tensor([1])).load_state(0)["seen"]
    tensor([3])
    """

    def __init__(self) -> None:
        self.states: dict[int, State] = {}

    def load_state(self, layer_idx: int) -> State | None:
        """The state of a layer, or None before its first call."""
        return self.states.get(layer_idx)

    def store_state(self, layer_idx: int, state: State, positions: int) -> None:
        """Keep the state of a layer."""
        self.states[layer_idx] = state

    def select(self, rows: Tensor) -> "LayerStates":
        """New states that hold the given rows of every tensor."""
        return self._map(lambda x: x.index_select(0, rows.to(x.device)))

    def detach(self) -> "LayerStates":
        """The same numbers without their history, to cut back-propagation through time."""
        return self._map(torch.Tensor.detach)

    def _map(self, change: Callable[[Tensor], Tensor]) -> "LayerStates":
        changed = LayerStates()
        for index, state in self.states.items():
            changed.states[index] = {name: change(x) for name, x in state.items()}
        return changed
