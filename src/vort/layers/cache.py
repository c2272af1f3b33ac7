"""Where layers keep their states between calls, with or without Hugging Face around."""

from collections.abc import Callable
from copy import copy
from typing import Self

import torch
from torch import Tensor

from vort.memories import State

__all__ = ["LayerStates"]


class LayerStates:
    """States by layer: the `past_key_values` of every `VortAttention`, `VortCache` included.

    Args:
        static: keep the tensors of the first call and overwrite them, so that addresses stay the
            same (for CUDA graphs); else every call brings new ones.

    >>> states = LayerStates()
    >>> states.load_state(0) is None
    True
    >>> states.store_state(0, {"seen": torch.tensor([3, 3])}, positions=3)
    >>> states.select(torch.tensor([1])).load_state(0)["seen"]
    tensor([3])
    """

    def __init__(self, *, static: bool = False) -> None:
        self.static = static
        # Whether a step of decoding may overwrite the states where they lie.
        self.in_place = False
        self.states: dict[int, State] = {}
        self.positions: dict[int, int] = {}

    def load_state(self, layer_idx: int) -> State | None:
        """The state of a layer, or None before its first call."""
        return self.states.get(layer_idx) or None

    def store_state(self, layer_idx: int, state: State, positions: int) -> None:
        """Keep the state of a layer after `positions` more columns, padding included."""
        self.positions[layer_idx] = self.positions.get(layer_idx, 0) + positions
        held = self.states.get(layer_idx)
        if not self.static:
            self.states[layer_idx] = state
        elif held is None or not _same_shapes(held, state):
            self.states[layer_idx] = {name: x.clone() for name, x in state.items()}
        else:
            for name, x in state.items():
                if held[name] is not x:
                    held[name].copy_(x)

    def change(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Replace every tensor by a function of it."""
        self.states = {
            index: {name: function(x) for name, x in state.items()}
            for index, state in self.states.items()
        }
        return self

    def copy(self) -> Self:
        """The same states, to go on with apart; tensors are shared unless static."""
        other = copy(self)
        other.states, other.positions = dict(self.states), dict(self.positions)
        return other.change(torch.clone) if self.static else other

    def select(self, rows: Tensor) -> Self:
        """A copy that holds the given rows of every tensor."""
        return self.copy().change(lambda x: x.index_select(0, rows.to(x.device)))

    def detach(self) -> Self:
        """Forget the history of all numbers, in place: back-propagation through time ends here."""
        return self.change(torch.Tensor.detach)

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(x.nbytes for state in self.states.values() for x in state.values())


def _same_shapes(held: State, state: State) -> bool:
    """Whether all tensors fit: the cache of softmax attention grows and never does."""
    return held.keys() == state.keys() and all(held[n].shape == x.shape for n, x in state.items())
