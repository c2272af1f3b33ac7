"""What follows from the bounds of packed sequences: made once, for all layers and both passes.

A model hands the same bounds to every layer. What kernels read of them takes a dozen small
launches, more than a layer's own.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import torch
from torch import Tensor

from vort.ops.custom import traced
from vort.ops.gpu.launcher import transformed

__all__ = ["ages", "made_once", "sequence_starts"]

Made = TypeVar("Made")


class _Known(NamedTuple):
    """What was made of one tensor, in one state: how often written to, the stream, the numbers."""

    bounds: "ref[Tensor]"
    state: tuple[int, int, bytes | None]
    made: dict[Hashable, Any]


_last: _Known | None = None


def made_once(
    bounds: Tensor, name: Hashable, make: Callable[[], Made], device: torch.device | None = None
) -> Made:
    """make(), or what it gave the last time it was asked for these very bounds by this name.

    device: where that is made; where the bounds are by default.

    Bounds that were written to since, or others of the same numbers, are looked at anew; on a GPU
    PyTorch must have counted the writing, which `.data` hides from it. So are those that something
    traces or records: what is made of them there belongs to the recording.

    >>> bounds, asked = torch.tensor([0, 2, 5]), []
    >>> [made_once(bounds, "count", lambda: asked.append(1) or 2) for _ in range(3)], len(asked)
    ([2, 2, 2], 1)
    >>> bounds[1] = 3
    >>> made_once(bounds, "count", lambda: asked.append(1) or 2), len(asked)
    (2, 2)
    """
    global _last
    if traced(bounds) or transformed() or bounds.is_inference():
        return make()
    stream, device = 0, bounds.device if device is None else device
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return make()
        stream = torch.cuda.current_stream(device).cuda_stream
    # Not every write is counted: NumPy's are not. Where looking costs nothing, numbers decide.
    numbers = bounds.numpy().tobytes() if bounds.device.type == "cpu" else None
    known, state = _last, (bounds._version, stream, numbers)
    if known is None or known.bounds() is not bounds or known.state != state:
        known = _last = _Known(ref(bounds, _forget), state, {})
    if name not in known.made:
        with torch.inference_mode(False):  # else a later call that trains could not keep it
            known.made[name] = make()
    found: Made = known.made[name]
    return found


def _forget(gone: "ref[Tensor]") -> None:
    global _last
    if _last is not None and _last.bounds is gone:
        _last = None


def sequence_starts(length: int, bounds: Tensor, device: torch.device) -> Tensor:
    """For each of `length` positions, where its sequence starts: `[T]`, int64.

    >>> sequence_starts(5, torch.tensor([0, 2, 2, 5]), torch.device("cpu"))
    tensor([0, 0, 2, 2, 2])
    """

    def make() -> Tensor:
        there = bounds.to(device, torch.int64)
        positions = torch.arange(length, device=device)
        return there[torch.searchsorted(there, positions, right=True) - 1]

    return made_once(bounds, ("starts", length, device), make, device)


def ages(bounds: Tensor, length: int) -> Tensor:
    """`[T]`: how many positions of its own sequence come before each.

    >>> ages(torch.tensor([0, 2, 2, 5]), 5)
    tensor([0, 1, 0, 1, 2])
    """

    def make() -> Tensor:
        starts = sequence_starts(length, bounds, bounds.device)
        return torch.arange(length, device=bounds.device) - starts

    return made_once(bounds, ("ages", length), make)
