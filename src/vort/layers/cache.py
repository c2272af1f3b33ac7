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
        # Positions that compiled calls have added: a number in Python would be part of the graph,
        # and make another one for every token.
        self.compiled: dict[int, Tensor] = {}

    def load_state(self, layer_idx: int) -> State | None:
        """The state of a layer, or None before its first call."""
        return self.states.get(layer_idx) or None

    def store_state(self, layer_idx: int, state: State, positions: int) -> None:
        """Keep the state of a layer after `positions` more columns, padding included."""
        held = self.states.get(layer_idx)
        if self.static and torch.compiler.is_compiling() and layer_idx in self.compiled:
            self.compiled[layer_idx].add_(positions)
        else:
            self.positions[layer_idx] = self.positions.get(layer_idx, 0) + positions
        if not self.static:
            self.states[layer_idx] = state
        elif held is None or not _same_shapes(held, state):
            self.states[layer_idx] = {name: x.clone() for name, x in state.items()}
            first = next(iter(state.values()), None)
            if first is not None and layer_idx not in self.compiled:
                self.compiled[layer_idx] = torch.zeros((), dtype=torch.int64, device=first.device)
        else:
            for name, x in state.items():
                if held[name] is not x:
                    held[name].copy_(x)

    def seen(self, layer_idx: int = 0) -> int:
        """Columns that a layer has seen, padding included."""
        counted = self.compiled.get(layer_idx)
        return self.positions.get(layer_idx, 0) + (0 if counted is None else int(counted))

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
        other.compiled = {index: x.clone() for index, x in self.compiled.items()}
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
