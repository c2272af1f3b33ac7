# mypy: ignore-errors
"""Parts that kernels of several ops are made of: tiles of rows, and hints to the compiler.

A tensor is ``[tokens, H, D]``; a batch is tokens laid end to end.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from vort.ops.gpu.launcher import Tile, launch, power_of_two

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # an older Triton
    gdc_launch_dependents = gdc_wait = None

__all__ = [
    "fence_loads", "fold", "keep_branch", "let_next_start", "load_column", "load_flipped",
    "load_rows", "store_rows", "uniform", "wait_for_inputs",
]  # fmt: skip

ON_GPU = tl.constexpr(not knobs.runtime.interpret)


@triton.jit
def load_rows(
    ptr, t0, n, h, H: tl.constexpr, col0, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):
    """Tile ``[BT, BD]`` of a ``[tokens, H, D]`` tensor; zero beyond ``n`` tokens or D columns."""
    rows = tl.arange(0, BT)
    cols = col0 + tl.arange(0, BD)
    base = ptr + (t0 * H + h) * D
    mask = (rows[:, None] < n) & (cols[None, :] < D)
    return tl.load(base + rows[:, None] * (H * D) + cols[None, :], mask=mask, other=0.0)


@triton.jit
def load_flipped(
    ptr, t0, n, h, H: tl.constexpr, col0, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):
    """The tile of :func:`load_rows` the other way around, ``[BD, BT]``."""
    rows = tl.arange(0, BT)
    cols = col0 + tl.arange(0, BD)
    base = ptr + (t0 * H + h) * D
    mask = (rows[None, :] < n) & (cols[:, None] < D)
    return tl.load(base + rows[None, :] * (H * D) + cols[:, None], mask=mask, other=0.0)


@triton.jit
def store_rows(
    ptr, x, t0, n, h, H: tl.constexpr, col0, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):
    """The reverse of :func:`load_rows`."""
    rows = tl.arange(0, BT)
    cols = col0 + tl.arange(0, BD)
    base = ptr + (t0 * H + h) * D
    mask = (rows[:, None] < n) & (cols[None, :] < D)
    tl.store(base + rows[:, None] * (H * D) + cols[None, :], x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_column(ptr, t0, n, h, H: tl.constexpr, s, S: tl.constexpr, BT: tl.constexpr):
    """Column ``s`` of a ``[tokens, H, S]`` tensor as ``[BT]`` float32."""
    rows = tl.arange(0, BT)
    base = ptr + (t0 * H + h) * S + s
    return tl.load(base + rows * (H * S), mask=rows < n, other=0.0).to(tl.float32)


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


def _on_hopper() -> bool:
    """Whether kernels are compiled for Hopper or later; without a GPU they are."""
    if knobs.runtime.interpret or torch.version.hip is not None:
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] >= 9


CAN_START_EARLY = tl.constexpr(gdc_wait is not None and _on_hopper())


@triton.jit
def let_next_start():
    """To be called first in a kernel of a chain whose kernels all call `wait_for_inputs`.

    The next kernel may then be launched while this one runs, and load what none of them writes.
    """
    if CAN_START_EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs():
    """To be called before the first load of what another kernel of the chain has written.

    And before the first store: memory may be in use by the kernel before.
    """
    if CAN_START_EARLY:
        gdc_wait()


def _left_out() -> bool:
    """Whether this Triton compiles for matrix units that need the fence, without adding it."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return version < (3, 8) and _on_hopper()


LEFT_OUT = tl.constexpr(_left_out())


@triton.jit
def fence_loads(step):
    """To be called in a loop after its loads, before the first product that uses them.

    step: any integer, say the loop's own; an instruction has to have an operand.

    A load that a loop has begun ahead of time (cp.async) writes shared memory by one path; matrix
    units read it by another, and by the rules of the instruction set may read what was there
    before unless ``fence.proxy.async`` stands between. Triton adds it from version 3.8 on; before,
    only where a product's other operand is stored in the same step of the loop. No wrong result
    was traced to its absence; it costs about one part in a hundred.
    """
    if LEFT_OUT:
        tl.inline_asm_elementwise(
            "fence.proxy.async.shared::cta; mov.b32 $0, $1;", "=r,r", [step],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def fold_kernel(partial, out, rows, N: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr):
    """BN column sums of ``[rows, N]``."""
    col = tl.program_id(0) * BN + tl.arange(0, BN)[None, :]
    acc = tl.zeros([BR, BN], dtype=tl.float32)
    for first in range(0, rows, BR):
        row = (first + tl.arange(0, BR)).to(tl.int64)[:, None]
        acc += tl.load(partial + row * N + col, mask=(row < rows) & (col < N), other=0.0)
    flat = tl.program_id(0) * BN + tl.arange(0, BN)
    tl.store(out + flat, tl.sum(acc, axis=0).to(out.dtype.element_ty), mask=flat < N)


def fold(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 `partial` summed over its first axis, in a fixed order; rounded once."""
    out = partial.new_empty(partial.shape[1:], dtype=dtype)
    size = out.numel()
    columns = min(32, power_of_two(size))
    launch(
        fold_kernel, -(-size // columns), partial, out, partial.shape[0],
        N=size, BN=columns, BR=128, tile=Tile(0, 4, 1),
    )  # fmt: skip
    return out
