"""Memories that add up: states aged, put together and taken apart again, without reading again.

States are sums of what tokens wrote, each decayed by constants. So a text can be read once and
apart, its state kept, and later aged by any number of steps in closed form, added to the states of
other texts, and subtracted again. In one layer the sum is what reading the texts in a row would
have left, but for the first tokens of each: their convolution and window then reach into the text
before. In the layers above it is an approximation: what a token writes there depends on what the
layers below remember of the texts before it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vort.models.cache_vort import VortCache

__all__ = ["aged", "merged", "without"]

_MEMORY = "memory."


@torch.no_grad()
def aged(model: Any, cache: VortCache, steps: int | Tensor) -> VortCache:
    """A copy whose memory is `steps` tokens older, as if these had written nothing.

    Window and convolution, which hold the last tokens themselves, stay as they are.

    Args:
        model: that the cache is of.
        cache: of any batch size.
        steps: 0 or more; or one for each row, `[B]`.
    """
    found = cache.copy()
    for index in _layers(model, [cache]):
        old = _aged(model, cache, index, _each(steps, cache))
        _store(found, index, {**_state(cache, index), **_named(old)})
    return found


@torch.no_grad()
def merged(
    model: Any, caches: Sequence[VortCache], ages: Sequence[int | Tensor] | None = None
) -> VortCache:
    """One memory of several texts that were read apart; window and convolution are the last's.

    Args:
        model: that the caches are of.
        caches: of the texts, the last one nearest; of one batch size.
        ages: how many tokens ago each text ended. By default as if they had been read in a row:
            each as long ago as the texts after it are long. Tokens of padded rows are counted where
            a layer has a window, each text's own; where none has, or where padded rows were merged
            before, ages must be given.
    """
    if not caches:
        raise ValueError("merged needs at least one memory, got none")
    if ages is not None and len(ages) != len(caches):
        raise ValueError(f"ages must be one for each of {len(caches)} memories, got {len(ages)}")
    _check_rows(caches)
    if ages is None:
        counts = [_seen(cache) for cache in caches]
        ages = [
            sum(counts[number + 1 :], torch.zeros_like(counts[0])) for number in range(len(counts))
        ]
    found = caches[-1].copy()
    for index in _layers(model, caches):
        parts = [
            _aged(model, cache, index, _each(age, cache, "ages"))
            for cache, age in zip(caches, ages, strict=True)
        ]
        total = {name: _sum([part[name] for part in parts]) for name in parts[0]}
        _store(found, index, {**_state(caches[-1], index), **_named(total)})
        _count(found, index, sum(cache.seen(index) for cache in caches))
    found.padded = any(cache.padded for cache in caches)
    found.uncounted = found.padded and (len(caches) > 1 or caches[0].uncounted)
    return found


@torch.no_grad()
def without(model: Any, cache: VortCache, other: VortCache, ago: int | Tensor = 0) -> VortCache:
    """A copy whose memory has lost a text: its state, read apart, is subtracted.

    Args:
        model: that both are of.
        cache: what is left of it is returned; window and convolution stay as they are.
        other: the text's, as it was when it was merged; of the same batch size.
        ago: how many tokens have been read since that text ended.
    """
    _check_rows([cache, other])
    found = cache.copy()
    for index in _layers(model, [cache, other]):
        old = _aged(model, other, index, _each(ago, other, "ago"))
        state = _state(cache, index)
        rest = {name: x - old[name].to(x.device) for name, x in _memory_of(state).items()}
        _store(found, index, {**state, **_named(rest)})
        _count(found, index, max(0, cache.seen(index) - other.seen(index)))
    found.padded = found.uncounted = cache.padded or other.padded
    return found


def _layers(model: Any, caches: Sequence[VortCache]) -> range:
    """All layers of the model; every cache must have seen something with as many."""
    count = model.config.num_hidden_layers
    for cache in caches:
        if cache.num_layers != count:
            raise ValueError(f"a memory is of {cache.num_layers} layers, the model has {count}")
        if len(cache.states) < count:
            raise ValueError("a memory that has seen nothing cannot be aged, merged or taken away")
    return range(count)


def _check_rows(caches: Sequence[VortCache]) -> None:
    rows = [_rows(cache) for cache in caches]
    if len(set(rows)) > 1:
        raise ValueError(
            f"memories must be of one batch size, got {', '.join(map(str, rows))} rows"
        )


def _aged(model: Any, cache: VortCache, index: int, steps: Tensor) -> dict[str, Tensor]:
    """The memory of a layer after `steps` `[B]`, once it is sure to be one that it could have."""
    memory = model.get_decoder().memories[index]
    state = _memory_of(_state(cache, index))
    held = sum(x.numel() for x in state.values()) // len(steps)
    size = memory.state_size()
    if held != size == memory.state_size(1):  # one that grows says itself that it cannot age
        raise ValueError(
            f"memories must be of the model given: its layer {index} keeps {size:,} numbers for "
            f"a row, a memory has {held:,}"
        )
    found: dict[str, Tensor] = memory.aged(state, steps)
    return found


def _state(cache: VortCache, index: int) -> Mapping[str, Tensor]:
    return cache.load_state(index) or {}  # a layer may keep nothing at all


def _memory_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(_MEMORY): x for n, x in state.items() if n.startswith(_MEMORY)}


def _named(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {_MEMORY + name: x for name, x in state.items()}


def _store(cache: VortCache, index: int, state: dict[str, Tensor]) -> None:
    cache.store_state(index, state, 0)


def _count(cache: VortCache, index: int, tokens: int) -> None:
    """Columns that a layer has seen, from now on: those of compiled steps are among them."""
    cache.positions[index] = tokens
    if index in cache.compiled:
        cache.compiled[index].zero_()


def _rows(cache: VortCache) -> int:
    first = next((x for state in cache.states.values() for x in state.values()), None)
    if first is None:
        raise ValueError("a memory that has seen nothing cannot be aged, merged or taken away")
    return len(first)


def _seen(cache: VortCache) -> Tensor:
    """Tokens that each row has seen, `[B]`; of padded rows a window has counted them."""
    if not cache.padded:
        return torch.full((_rows(cache),), cache.seen(0))
    if cache.uncounted:
        raise ValueError(
            "ages must be given for padded rows that were merged before: their window has counted "
            "the last text alone"
        )
    counts = [state["local.seen"] for state in cache.states.values() if "local.seen" in state]
    if not counts:
        raise ValueError(
            "ages must be given for padded rows where no layer has a window, which counts tokens"
        )
    return counts[0].cpu()


def _each(steps: int | Tensor, cache: VortCache, name: str = "steps") -> Tensor:
    """Steps of each row, `[B]`; name: what they are called where they were given."""
    rows = _rows(cache)
    try:
        given = torch.as_tensor(steps)
    except (TypeError, ValueError, RuntimeError):  # no number, or one beyond all
        given = torch.tensor(float("nan"))
    fits = given.ndim == 0 or (given.ndim == 1 and len(given) == rows)
    if not fits or not bool(((given >= 0) & given.isfinite()).all()):
        raise ValueError(
            f"{name} must be 0 or more and finite, one number or one for each of "
            f"{rows} rows, got {steps}"
        )
    return given.expand(rows)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """Their sum, where the last is: window and convolution are its own."""
    total = parts[0].to(parts[-1].device)
    for part in parts[1:]:
        total = total + part.to(total.device)
    return total
