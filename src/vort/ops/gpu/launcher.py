"""Whether kernels can take some tensors, and their launches; Triton itself is not imported here.

A kernel is launched again without asking Triton again which of its compiled forms to run: Triton
looks at every argument on every launch, which for kernels of forty arguments takes longer than
short kernels run. Here the question is asked once for each combination of compile-time constants,
argument types and alignments, all that a compiled form depends on; then the driver is called
directly, unless a profiler has asked Triton to be told.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = [
    "Tile", "debugging", "dense", "even_rows", "has_triton", "kernels_take", "launch",
    "power_of_two", "require_kernels", "transformed", "without_kernels",
]  # fmt: skip

# Asked once: torch.compile does not trace a search for packages.
_FOUND = importlib.util.find_spec("triton") is not None
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
_switched_off = 0


def has_triton() -> bool:
    """Whether the triton package is installed."""
    return _FOUND


@contextmanager
def without_kernels() -> Iterator[None]:
    """Within, all is computed by PyTorch alone, on a GPU too: for what kernels cannot do.

    Kernels have a gradient and no second one.

    >>> with without_kernels():
    ...     kernels_take(torch.zeros(3))
    False
    """
    global _switched_off
    _switched_off += 1
    try:
        yield
    finally:
        _switched_off -= 1


def transformed() -> bool:
    """Whether torch.func or forward-mode differentiation looks on, which know PyTorch alone."""
    if torch.compiler.is_compiling():
        return False
    current: int = forward_ad._current_level
    return bool(torch._C._are_functorch_transforms_active()) or current >= 0


def kernels_take(*tensors: Tensor) -> bool:
    """Whether these tensors are on a GPU, of one dtype that kernels know, and Triton is there.

    >>> kernels_take(torch.zeros(3))
    False
    """
    dtype = tensors[0].dtype
    for x in tensors:  # several times a layer: the short way to ask
        if not x.is_cuda or x.dtype is not dtype:
            return False
    known = dtype is torch.bfloat16 or dtype is torch.float32
    return known and _FOUND and not _switched_off and not transformed()


def require_kernels(device: torch.device, instead: str) -> None:
    """Refuse backend 'triton' where it cannot run, naming the backend that can."""
    if not has_triton():
        raise RuntimeError(f"backend 'triton' needs the triton package; use '{instead}' without it")
    if device.type == "cuda" or torch.compiler.is_compiling():
        return  # reading Triton's settings would break the graph
    from triton import knobs

    # the interpreter (TRITON_INTERPRET=1) runs kernels in Python, which needs no GPU
    if not knobs.runtime.interpret:
        raise RuntimeError(
            f"backend 'triton' needs CUDA tensors, got {device.type}; use '{instead}' there"
        )


# Whether kernels that are made for it may start before the one before them has ended.
OVERLAP = False


class Tile(NamedTuple):
    """One kernel's launch: columns in a block, warps, pipeline stages, register limit.

    early: the kernel waits for its inputs by itself (`wait_for_inputs`), so it may start before
    the kernel that makes them has ended, where the GPU can do that.
    """

    columns: int
    warps: int
    stages: int
    registers: int | None = None
    early: bool = False

    def options(self) -> dict[str, int]:
        """What Triton is told at launch; multiply-adds stay one instruction from 3.10 on too."""
        options = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}
        if self.early and OVERLAP:
            options |= {"launch_pdl": True}
        return options if self.registers is None else options | {"maxnreg": self.registers}


def debugging() -> bool:
    """Whether the environment asks for costly checks: `VORT_DEBUG=1`.

    >>> import os; os.environ["VORT_DEBUG"] = "1"; debugging()
    True
    >>> del os.environ["VORT_DEBUG"]; debugging()
    False
    """
    return os.environ.get("VORT_DEBUG", "0") not in ("", "0")


def power_of_two(n: int, least: int = 16) -> int:
    """The smallest power of two that holds n, but no less than `least`.

    >>> power_of_two(80), power_of_two(5)
    (128, 16)
    """
    return max(least, 1 << (n - 1).bit_length())


@overload
def dense(x: Tensor) -> Tensor: ...
@overload
def dense(x: Tensor | None) -> Tensor | None: ...
def dense(x: Tensor | None) -> Tensor | None:
    """x, contiguous; None stays None."""
    return None if x is None else x.contiguous()


def even_rows(x: Tensor) -> bool:
    """Whether rows follow each other at one distance, so that they can be counted through.

    >>> even_rows(torch.zeros(2, 3, 8)[..., :5]), even_rows(torch.zeros(2, 3, 8)[:, :2])
    (True, False)
    """
    return all(x.stride(i) == x.stride(i + 1) * x.shape[i + 1] for i in range(x.dim() - 2))


def launch(kernel: Any, grid: int, *arguments: Any, tile: Tile, **constants: Any) -> None:
    """Run `grid` programs of `kernel` on the GPU of the first argument, whichever is current.

    Integer arguments must be marked do_not_specialize. `arguments` come in the kernel's order, a
    tensor first; every later parameter is a constant.
    """
    if grid == 0:
        return
    index = arguments[0].device.index
    if index is not None and index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):
            launch(kernel, grid, *arguments, tile=tile, **constants)
        return
    # What a compiled form depends on: types, alignments, widths of integers. By identity, since a
    # kernel's own hash reads its source; in one expression, since this runs for every launch.
    key = (
        id(kernel),
        index,
        tile,
        *constants.values(),
        *[
            (x.dtype if x.data_ptr() & 15 == 0 else (x.dtype,))
            if isinstance(x, Tensor)
            else (x.bit_length() > 31 if isinstance(x, int) else type(x))
            for x in arguments
        ],
    )
    known = _compiled.get(key)
    if known is None:
        compiled = kernel[(grid,)](*arguments, **constants, **tile.options())
        if compiled is not None:  # the interpreter has nothing to hand back
            names = kernel.arg_names[len(arguments) :]
            _compiled[key] = (compiled, tuple(constants[name] for name in names))
        return
    compiled, rest = known
    if _watched():
        compiled[(grid, 1, 1)](*arguments, *rest)
        return
    stream = torch._C._cuda_getCurrentRawStream(index)
    compiled.run(
        grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
        *arguments, *rest,
    )  # fmt: skip


def _watched() -> bool:
    """Whether somebody has asked Triton to be told of launches."""
    settings = _settings()
    enter, leave = settings.launch_enter_hook, settings.launch_exit_hook
    # a chain of hooks may be empty; a hook is no chain
    return bool(
        (enter is not None and getattr(enter, "calls", True))
        or (leave is not None and getattr(leave, "calls", True))
    )


@cache
def _settings() -> Any:
    from triton import knobs

    return knobs.runtime
