"""Where layers keep their states between calls, with or without Hugging Face around."""

from collections.abc import Callable
from copy import copy
from typing import Any, Self

import torch
from torch import Tensor

from vort.memories import State

__all__ = ["LayerStates"]

# What `state_dtype` speaks of: by far the largest of a layer's states.
WIDE = "memory.G"


class LayerStates:
    """States by layer: the `past_key_values` of every `VortAttention`, `VortCache` included.

    Args:
        static: keep the tensors of the first call and overwrite them, so that addresses stay the
            same (for CUDA graphs); else every call brings new ones.
        state_dtype: how the states of a memory are kept, torch.float32 or torch.bfloat16; layers
            compute in float32 all the same. bfloat16 halves what a step of decoding reads and
            writes, and is rounded at random (by a fixed rule), since a slow scale loses less in a
            step than half of its last bit.

    >>> states = LayerStates()
    >>> states.load_state(0) is None
    True
    >>> states.store_state(0, {"seen": torch.tensor([3, 3])}, positions=3)
    >>> states.select(torch.tensor([1])).load_state(0)["seen"]
    tensor([3])
    """

    def __init__(self, *, static: bool = False, state_dtype: torch.dtype = torch.float32) -> None:
        if state_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"state_dtype must be torch.float32 or torch.bfloat16, got {state_dtype}"
            )
        self.static = static
        self.state_dtype = state_dtype
        # Whether a step of decoding may overwrite the states where they lie.
        self.in_place = False
        self.states: dict[int, State] = {}
        self.positions: dict[int, int] = {}
        # Positions that compiled calls have added: a number in Python would be part of the graph,
        # and make another one for every token.
        self.compiled: dict[int, Tensor] = {}
        # Whether rows may have seen fewer tokens than columns.
        self.padded = False
        # Where a step on a CPU has put the states, see `vort.layers.plain_step`: the one after the
        # next overwrites them.
        self.buffers: Any = None

    def load_state(self, layer_idx: int) -> State | None:
        """The state of a layer, or None before its first call."""
        state = self.states.get(layer_idx) or None
        if state is not None and self._lent:
            state = {name: x.clone() for name, x in state.items()}
        if state is None or self.state_dtype == torch.float32 or WIDE not in state:
            return state
        return {**state, WIDE: state[WIDE].float()}

    def store_state(self, layer_idx: int, state: State, positions: int) -> None:
        """Keep the state of a layer after `positions` more columns, padding included."""
        seen: int | Tensor
        if self.static and torch.compiler.is_compiling() and layer_idx in self.compiled:
            seen = self.compiled[layer_idx].add_(positions)
        else:
            seen = self.positions[layer_idx] = self.positions.get(layer_idx, 0) + positions
        if WIDE in state and self.state_dtype == torch.bfloat16:
            state = {**state, WIDE: _narrowed(state[WIDE], seen)}
        held = self.states.get(layer_idx)
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
        """The same states, to go on with apart; tensors are shared where none is overwritten."""
        other = self.bookmark()
        return other.change(torch.clone) if self._lent and not self.static else other

    def bookmark(self) -> Self:
        """The same states, to go back to should the next call fail: shared unless static."""
        other = copy(self)
        other.states, other.positions, other.buffers = dict(self.states), dict(self.positions), None
        other.compiled = {index: x.clone() for index, x in self.compiled.items()}
        return other.change(torch.clone) if self.static else other

    @property
    def _lent(self) -> bool:
        """Whether tensors are buffers of a step, for it to overwrite."""
        return self.buffers is not None and self.buffers.hold(self)

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


def _narrowed(x: Tensor, seed: int | Tensor) -> Tensor:
    """Float32 as bfloat16, rounded up or down by bits that look random: right on average.

    The bits are a hash of the number itself, its place and the seed, so that the same calls give
    the same states and no generator moves on.
    """
    if x.dtype == torch.bfloat16:
        return x
    bits = x.contiguous().view(torch.int32)
    place = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
    factor = 0x27D4EB2F
    moved = _signed(seed * factor) if isinstance(seed, int) else seed.to(torch.int32) * factor
    noise = (bits ^ (place * _signed(0x9E3779B1))) + moved
    for shift, factor in ((15, 0x85EBCA6B), (13, 0xC2B2AE35)):
        noise = (noise ^ ((noise >> shift) & (2 ** (32 - shift) - 1))) * _signed(factor)
    rounded = (bits + ((noise >> 16) & 0xFFFF)) & _signed(0xFFFF0000)
    return torch.where(x.isnan(), x, rounded.view(torch.float32)).to(torch.bfloat16)


def _signed(n: int) -> int:
    """The last 32 bits of n as a number of int32."""
    n %= 2**32
    return n - 2**32 if n >= 2**31 else n


def _same_shapes(held: State, state: State) -> bool:
    """Whether all tensors fit: the cache of softmax attention grows and never does."""
    return held.keys() == state.keys() and all(held[n].shape == x.shape for n, x in state.items())
