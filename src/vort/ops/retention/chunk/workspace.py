"""Memory for temporaries that outlives them."""

import math
import threading

import torch
from torch import Tensor

from vort.ops.retention.chunk.layout import WORKSPACE

__all__ = ["Workspace"]


class Workspace:
    """Large temporaries by name, written over from segment to segment.

    Fresh pages cost a CPU more than the sums that fill them, so there the buffers also outlive the
    call: one set for each thread, no larger than a few workspaces.
    """

    _of_thread = threading.local()

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        if like.device.type == "cpu":
            self.buffers = self._of_thread.__dict__.setdefault("buffers", {})
        if _fills_memory():
            for buffer in self.buffers.values():
                buffer.fill_(math.nan)  # as torch.empty would, so that a missed write shows

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor of this shape, contents undefined; it overwrites the last one of its name."""
        size, key = math.prod(shape), (name, self.like.dtype)
        buffer = self.buffers.get(key)
        if buffer is None or buffer.numel() < size:
            buffer = self.buffers[key] = self.like.new_empty(size)
        return buffer[:size].view(shape)

    def close(self) -> None:
        """Let go of what is too large to keep."""
        for key in [key for key, x in self.buffers.items() if x.numel() > 2 * WORKSPACE["cpu"]]:
            del self.buffers[key]


def _fills_memory() -> bool:
    """Whether torch.empty comes back filled with NaN."""
    fills = bool(getattr(torch.utils.deterministic, "fill_uninitialized_memory", False))
    return fills and torch.are_deterministic_algorithms_enabled()
