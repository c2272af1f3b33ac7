# mypy: ignore-errors
"""What Triton's compiler does not see by itself, said in one instruction each."""

import triton
import triton.language as tl
from triton import knobs

__all__ = ["keep_branch", "uniform"]

ON_GPU = tl.constexpr(not knobs.runtime.interpret)


@triton.jit
def keep_branch(step):
    """To be called first in an `if` that is seldom true: without it both sides are computed.

    step: any integer; an instruction has to have an operand.
    """
    if ON_GPU:
        tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [step], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def uniform(number):
    """An integer that is the same in every thread.

    Loops bounded by one that may differ cannot keep the addresses of their products in uniform
    registers, where products want them.
    """
    if ON_GPU:
        number = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [number],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return number
