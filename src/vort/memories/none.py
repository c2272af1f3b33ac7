"""No memory: what local attention reaches is all there is."""

from typing import ClassVar

import torch
from torch import Tensor

from vort.memories.interface import Memory, MemoryInputs, MemoryOutput, State

__all__ = ["NoMemory"]


class NoMemory(Memory):
    """Retrieves nothing and keeps nothing.

    >>> q, k, v = torch.randn(3, 1, 5, 2, 8)
    >>> NoMemory()(MemoryInputs(torch.randn(1, 5, 16), q, k, v)).output.abs().sum()
    tensor(0.)
    """

    takes_parts: ClassVar[bool] = True
    records_steps: ClassVar[bool] = True

    def forward(
        self, inputs: MemoryInputs, state: State | None = None, *, output_state: bool = False
    ) -> MemoryOutput:
        """Zeros `[B, T, H, V]`."""
        zeros = torch.zeros_like(inputs.q[..., :1]).expand(*inputs.q.shape[:3], inputs.v.shape[-1])
        return MemoryOutput(zeros, {} if output_state else None)

    def state_size(self, length: int = 0) -> int:
        """Nothing."""
        return 0

    def aged(self, state: State, steps: Tensor) -> State:
        """Nothing is as old as ever."""
        return state
