"""The memory of a model between calls, as a Hugging Face cache of fixed size.

Hugging Face's own hybrid layers (a recurrent state beside a sliding window) assume that all rows
of a batch have seen equally many positions. Here padding counts for nothing, so every row has its
own count, and the state is a handful of tensors of several shapes: hence a cache of our own.
"""

# transformers leaves its own hooks untyped.
# mypy: disable-error-code="no-untyped-call"

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from vort.memories.interface import State

__all__ = ["VortCache", "VortCacheLayer"]


class VortCacheLayer(CacheLayerMixin):
    """The state of one layer: named tensors whose first axis counts sequences."""

    is_croppable = False
    supports_early_init = False

    def __init__(self, *, static: bool = False) -> None:
        super().__init__()
        self.static = static
        self.is_compileable = static
        self.positions = 0
        self.state: dict[str, Tensor] = {}

    def store(self, state: State, positions: int) -> None:
        """Take a new state; static layers copy it into the buffers they have."""
        self.positions += positions
        fits = self.static and self._has_shapes_of(state)
        if not fits:
            self.state = {name: x.clone() if self.static else x for name, x in state.items()}
            self.is_initialized = True
            return
        for name, x in state.items():
            self.state[name].copy_(x)

    def _has_shapes_of(self, state: State) -> bool:
        """Whether all tensors fit: the cache of softmax attention grows and never does."""
        return self.state.keys() == state.keys() and all(
            self.state[name].shape == x.shape for name, x in state.items()
        )

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by a function of it."""
        self.state = {name: function(x) for name, x in self.state.items()}

    def reset(self) -> None:
        """Forget everything; buffers of a static layer stay where they are."""
        self.positions = 0
        if self.static:
            for x in self.state.values():
                x.zero_()
        else:
            self.state = {}
            self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows that beam search goes on with."""
        rows = {name: x.index_select(0, beam_idx.to(x.device)) for name, x in self.state.items()}
        self.store(rows, 0)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self.change(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows."""
        self.change(lambda x: x.index_select(0, indices.to(x.device)))

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: a memory that has decayed and been added to cannot be taken back."""
        if tokens_to_remove != 0:
            raise NotImplementedError(
                "a VortCache cannot be cropped: copy it (copy.deepcopy) before the tokens that "
                "may have to be taken back"
            )

    def get_seq_length(self) -> int:
        """Columns seen so far, padding included."""
        return self.positions

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    # The name of the former in transformers before 5.2x.
    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of a mask over all columns."""
        return self.positions + query_length, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the first state brings its shapes."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Refuse: keys and values are not what is kept here."""
        raise NotImplementedError("a VortCache keeps states, not keys and values: use store_state")

    def offload(self) -> None:
        """Move the state to the CPU."""
        self._device = next((x.device for x in self.state.values()), torch.device("cpu"))
        self.change(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move the state back to where it was before `offload`."""
        device = getattr(self, "_device", None)
        if device is not None:
            self.change(lambda x: x.to(device, non_blocking=True))


class VortCache(Cache):
    """States of all layers of a model: their size does not depend on how much they have seen.

    Args:
        num_layers: layers of the model.
        static: keep the tensors of the first call and overwrite them, so that addresses stay the
            same (for CUDA graphs); else every call makes new ones.

    >>> cache = VortCache(num_layers=2)
    >>> cache.get_seq_length(), cache.nbytes
    (0, 0)
    """

    layers: list[VortCacheLayer]  # type: ignore[assignment]

    def __init__(self, num_layers: int, *, static: bool = False) -> None:
        super().__init__(layers=[VortCacheLayer(static=static) for _ in range(num_layers)])

    def load_state(self, layer_idx: int) -> State | None:
        """The state of a layer, or None before its first call."""
        return self.layers[layer_idx].state or None

    def store_state(self, layer_idx: int, state: State, positions: int) -> None:
        """Keep the state of a layer after `positions` more columns."""
        self.layers[layer_idx].store(state, positions)

    def detach(self) -> "VortCache":
        """Cut back-propagation through time here, in place."""
        for layer in self.layers:
            layer.change(torch.Tensor.detach)
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(
            x.numel() * x.element_size() for layer in self.layers for x in layer.state.values()
        )
