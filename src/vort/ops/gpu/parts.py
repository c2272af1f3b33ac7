# mypy: ignore-errors
"""Parts that kernels of several ops are made of: tiles of rows, and hints to the compiler.

A tensor is ``[tokens, H, D]``; a batch is tokens laid end to end.
"""

import torch
import triton
import triton.language as tl
from triton import knobs

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # an older Triton
    gdc_launch_dependents = gdc_wait = None

__all__ = [
    "LN2", "LOG2E", "ask", "fence_loads", "finished", "keep_branch", "let_next_start",
    "load_column", "load_flipped", "load_rows", "narrow", "power", "reciprocal", "sigmoid",
    "store_rows", "uniform", "wait_for_inputs", "widen",
]  # fmt: skip

ON_GPU = tl.constexpr(not knobs.runtime.interpret)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(
    ptr, t0, n, h, H: tl.constexpr, col0, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):
    """Tile ``[BT, BD]`` of a ``[tokens, H, D]`` tensor; zero beyond ``n`` tokens or D columns.

    n: None where all BT tokens are there: without masks it takes fewer instructions.
    """
    rows = tl.arange(0, BT)
    cols = col0 + tl.arange(0, BD)
    base = ptr + (t0 * H + h) * D
    if n is not None:
        mask = (rows[:, None] < n) & (cols[None, :] < D)
        x = tl.load(base + rows[:, None] * (H * D) + cols[None, :], mask=mask, other=0.0)
    elif D % BD:
        at = rows[:, None] * (H * D) + cols[None, :]
        x = tl.load(base + at, mask=cols[None, :] < D, other=0.0)
    else:
        x = tl.load(base + (rows[:, None] * (H * D) + cols[None, :]))
    return x


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
    if n is not None:
        mask = (rows[:, None] < n) & (cols[None, :] < D)
        places = base + rows[:, None] * (H * D) + cols[None, :]
        tl.store(places, x.to(ptr.dtype.element_ty), mask=mask)
    else:
        at = rows[:, None] * (H * D) + cols[None, :]
        if D % BD:
            tl.store(base + at, x.to(ptr.dtype.element_ty), mask=cols[None, :] < D)
        else:
            tl.store(base + at, x.to(ptr.dtype.element_ty))


@triton.jit
def load_column(ptr, t0, n, h, H: tl.constexpr, s, S: tl.constexpr, BT: tl.constexpr):
    """Column ``s`` of a ``[tokens, H, S]`` tensor as ``[BT]`` float32; n: see :func:`load_rows`."""
    rows = tl.arange(0, BT)
    base = ptr + (t0 * H + h) * S + s
    if n is not None:
        x = tl.load(base + rows * (H * S), mask=rows < n, other=0.0)
    else:
        x = tl.load(base + rows * (H * S))
    return x.to(tl.float32)


@triton.jit
def widen(x):
    """To float32; of two bfloat16 numbers that share a register, each is one instruction away."""
    if x.dtype == tl.bfloat16:
        if ON_GPU:
            x = tl.inline_asm_elementwise(
                "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x],
                dtype=tl.float32, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            x = x.to(tl.float32)
    return x


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """From float32, two numbers an instruction: one at a time where both forms are used on."""
    if dtype == tl.bfloat16:
        if ON_GPU:
            x = tl.inline_asm_elementwise(
                "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x],
                dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            x = x.to(dtype)
    return x


@triton.jit
def power(e):
    """2 to the e: one instruction of the special unit, with no care for tiny numbers."""
    if ON_GPU:
        e = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [e], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        e = tl.exp2(e)
    return e


@triton.jit
def reciprocal(x):
    """1 / x, likewise: to the last bit but one."""
    if ON_GPU:
        x = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        x = 1.0 / x
    return x


@triton.jit
def sigmoid(x):
    """Two instructions of the special unit, and two more."""
    return reciprocal(1.0 + power(x * -LOG2E))


@triton.jit
def ask(rows, mask):
    """Have lines brought near that are loaded later; rows: where each begins, ``[BT, 1]``."""
    if ON_GPU:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
            "=r,l,r", [rows, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


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
def finished(x):
    """A product's result, waited for here, so that it is not one with the sum it is added to.

    A product that adds to what a loop carries may run on into the loop's next step. Where nothing
    else of that step ends before it does, the assembler gives up (C7515): it then waits after every
    16 columns of every product of the kernel.
    """
    if ON_GPU:
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return x


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
