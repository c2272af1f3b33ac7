"""The memory of a model between calls, as a Hugging Face cache of fixed size.

Hugging Face's own hybrid layers (a recurrent state beside a sliding window) assume that all rows
of a batch have seen equally many positions. Here padding counts for nothing, so every row has its
own count, and the state is a handful of tensors of several shapes: hence a cache of our own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache

from vort.layers import LayerStates

__all__ = ["VortCache", "dense_state", "wrong_cache"]


class VortCache(LayerStates, Cache):
    """States of all layers of a model: their size does not depend on how much they have seen.

    `LayerStates` that answer to what Hugging Face asks of a cache.

    Args:
        num_layers: layers of the model.
        static: keep the tensors of the first call and overwrite them, so that addresses stay the
            same (for CUDA graphs); else every call makes new ones.
        state_dtype: how the states of memories are kept, see `LayerStates`.
        grows: whether states grow with what they have seen, as those of memory="softmax" do.

    A cache is a pytree of its states, for `torch.export` and `torch.func`.

    >>> cache = VortCache(num_layers=2)
    >>> cache.get_seq_length(), cache.nbytes
    (0, 0)
    """

    def __init__(
        self,
        num_layers: int,
        *,
        static: bool = False,
        state_dtype: torch.dtype = torch.float32,
        grows: bool = False,
    ) -> None:
        LayerStates.__init__(self, static=static, state_dtype=state_dtype)
        self.grows = grows
        # As it was before a recorded step lent its buffers.
        self.was_static = static
        # Whether rows of padded texts were merged: no window has counted all that they have seen.
        self.uncounted = False
        # What Hugging Face would keep by layer is kept here, so it has no layers to look at.
        Cache.__init__(self, layers=[])
        self.num_layers = num_layers

    def __repr__(self) -> str:
        return f"VortCache(num_layers={self.num_layers}, static={self.static})"

    def __len__(self) -> int:
        return self.num_layers

    @property
    def is_compileable(self) -> bool:
        """Whether decoding steps can be compiled with it: the same shapes at every token."""
        return self.static and not self.grows

    @property
    def is_initialized(self) -> bool:
        """Whether it holds anything; buffers of a static cache stay after `reset`."""
        return bool(self.states)

    @property
    def is_croppable(self) -> bool:
        """No: see `crop`."""
        return False

    def reset(self) -> None:
        """Forget everything; buffers of a static cache stay where they are."""
        self.positions, self.padded, self.uncounted = {}, False, False
        for count in self.compiled.values():
            count.zero_()
        if self.static:
            for state in self.states.values():
                for x in state.values():
                    x.zero_()
        else:
            self.states = {}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows that beam search goes on with."""
        for index, state in self.states.items():
            rows = {name: x.index_select(0, beam_idx.to(x.device)) for name, x in state.items()}
            self.store_state(index, rows, 0)

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

    def aged(self, steps: int | Tensor, model: Any) -> "VortCache":
        """A copy whose memory is `steps` tokens older; see `vort.models.merging`."""
        from vort.models.merging import aged

        return aged(model, self, steps)

    @staticmethod
    def merged(
        caches: "Sequence[VortCache]", model: Any, ages: Sequence[int | Tensor] | None = None
    ) -> "VortCache":
        """One memory of several texts read apart; see `vort.models.merging`."""
        from vort.models.merging import merged

        return merged(model, caches, ages)

    def without(self, other: "VortCache", model: Any, ago: int | Tensor = 0) -> "VortCache":
        """A copy whose memory has lost a text; see `vort.models.merging`."""
        from vort.models.merging import without

        return without(model, self, other, ago)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen so far, padding included."""
        return self.seen(layer_idx)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No limit."""
        return -1

    # The name of the former in transformers before 5.2x.
    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(length, offset) of a mask over all columns."""
        return self.get_seq_length(layer_idx) + query_length, 0

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: keys and values are not what is kept here."""
        raise NotImplementedError("a VortCache keeps states, not keys and values: use store_state")


def dense_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of a layer's state, detached and contiguous: buffers that a recording can have."""
    form = torch.contiguous_format
    return {name: x.detach().clone(memory_format=form) for name, x in state.items()}


# Beside the states: sizes and kinds, which a traced program takes as they are.
_KINDS = (
    *("num_layers", "static", "was_static", "in_place", "grows", "state_dtype", "padded"),
    "uncounted",
)


def wrong_cache(given: object) -> str:
    """What is said to a cache of another kind."""
    kind = type(given).__name__
    return f"past_key_values must be a VortCache (model.new_cache()), got {kind}"


def _flatten(cache: VortCache) -> tuple[list[Any], Any]:
    kinds = tuple(getattr(cache, name) for name in _KINDS)
    return [dict(cache.states), cache.compiled], (kinds, tuple(cache.positions.items()))


def _flatten_with_keys(cache: VortCache) -> tuple[list[Any], Any]:
    children, context = _flatten(cache)
    keys = [pytree.GetAttrKey("states"), pytree.GetAttrKey("compiled")]
    return list(zip(keys, children, strict=True)), context


def _unflatten(children: Any, context: Any) -> VortCache:
    kinds, positions = context
    cache = VortCache(kinds[0], static=kinds[1])
    for name, value in zip(_KINDS, kinds, strict=True):
        setattr(cache, name, value)
    cache.states, cache.compiled = children
    cache.positions = dict(positions)
    return cache


pytree.register_pytree_node(
    VortCache,
    _flatten,
    _unflatten,
    serialized_type_name="vort.VortCache",
    flatten_with_keys_fn=_flatten_with_keys,
)
