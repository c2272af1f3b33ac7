# mypy: ignore-errors
"""The fence between pipelined loads and Hopper's matrix units, where Triton leaves it out.

A load that a loop has begun ahead of time (cp.async) writes shared memory by one path; matrix units
read it by another, and by the rules of the instruction set may read what was there before unless
``fence.proxy.async`` stands between. Triton adds it from version 3.8 on; before, only where a
product's other operand is stored in the same step of the loop. No wrong result was traced to its
absence; it costs about one part in a hundred.
"""

import torch
import triton
import triton.language as tl
from triton import knobs

__all__ = ["fence_loads"]


def _left_out() -> bool:
    """Whether this Triton compiles for matrix units that need the fence, without adding it."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version >= (3, 8) or knobs.runtime.interpret or torch.version.hip is not None:
        return False
    # compiling without a GPU is for the newest
    return not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] >= 9


LEFT_OUT = tl.constexpr(_left_out())


@triton.jit
def fence_loads(step):
    """To be called in a loop after its loads, before the first product that uses them.

    step: any integer, say the loop's own; an instruction has to have an operand.
    """
    if LEFT_OUT:
        tl.inline_asm_elementwise(
            "fence.proxy.async.shared::cta; mov.b32 $0, $1;", "=r,r", [step],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
