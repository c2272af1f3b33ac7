"""Products of a batch of matrices on a CPU, as fast as the machine has them.

PyTorch hands a batch to MKL as a whole. Where it is built without MKL (aarch64, macOS) it goes
through the batch itself, matrix by matrix: a microsecond or two for each, and fifty where the
second factor is transposed, for matrices that take one. There the functions below let NumPy do it,
whose loop is in C. Elsewhere, and for whatever PyTorch has to see, they are PyTorch's own.

NumPy's library has threads of its own, which would share out every small matrix, and wait for each
other after it: a batch is one thread's.
"""

import ctypes
import os
from collections.abc import Callable
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vort.ops.custom import traced
from vort.ops.gpu.launcher import transformed

__all__ = ["ONE_BY_ONE", "baddbmm", "baddbmm_", "bmm", "one_by_one"]

# Whether PyTorch goes through a batch by itself.
ONE_BY_ONE = not torch.backends.mkl.is_available()
# Products of fewer multiplications than this PyTorch does on the spot, sooner than a library would.
TINY = 128


def one_by_one(x: Tensor) -> bool:
    """Whether PyTorch would multiply a batch like x matrix by matrix, and another may do it.

    >>> one_by_one(torch.zeros(1, 1, 1, dtype=torch.int64))
    False
    """
    return (
        ONE_BY_ONE
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and not traced(x)
        and not transformed()
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._len_torch_dispatch_stack()
    )


def bmm(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`torch.bmm`: a [N, i, k] times b [N, k, j], to out [N, i, j] if it is given.

    >>> bmm(torch.ones(2, 3, 4), torch.ones(2, 5, 4).mT).unique()
    tensor([4.])
    """
    if not _taken(a, b):
        return torch.bmm(a, b, out=out)
    if a.shape[2] == 1:  # which NumPy leaves to no library
        return torch.mul(a, b, out=out)
    if out is None:
        out = a.new_empty(len(a), a.shape[1], b.shape[2])
    with _one_thread:
        np.matmul(_array(a), _array(b), out=out.numpy())
    return out


def baddbmm(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """`torch.baddbmm`: beta c + alpha (a times b); c may be broadcast.

    >>> baddbmm(torch.ones(4), torch.ones(2, 3, 4), torch.ones(2, 4, 4), beta=-1, alpha=2).unique()
    tensor([7.])
    """
    if not _taken(a, b, c):
        return torch.baddbmm(c, a, b, beta=beta, alpha=alpha)
    product = bmm(a, b)
    return torch.add(c if beta == 1 else c * beta, product, alpha=alpha, out=product)


def baddbmm_(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`Tensor.baddbmm_`: add a times b to c [N, i, j], and return it.

    >>> baddbmm_(torch.ones(2, 3, 4), torch.ones(2, 3, 4), torch.ones(2, 4, 4)).unique()
    tensor([5.])
    """
    if not _taken(a, b, c):
        return c.baddbmm_(a, b)
    if a.shape[2] == 1:
        return c.addcmul_(a, b)
    return c.add_(bmm(a, b))


class _OneThread:
    """While somebody is within, NumPy's library keeps to the thread that calls it.

    The number is the process's: the first to come sets it, the last to go gives it back. Where the
    library is another than OpenBLAS nothing is changed.
    """

    def __init__(self) -> None:
        self._lock, self._within, self._former = Lock(), 0, 1
        self._count, self._set = _thread_numbers()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """A process that was forked has none of the threads that were within."""
        if self._within:
            self._set(self._former)
        self._lock, self._within = Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if self._within == 0:
                self._former = self._count()
                self._set(1)
            self._within += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._within -= 1
            if self._within == 0:
                self._set(self._former)


def _thread_numbers() -> tuple[Callable[[], int], Callable[[int], object]]:
    """How many threads NumPy's OpenBLAS may use, to be asked and set."""
    try:
        # A search in a module goes through what it is linked with.
        library = ctypes.CDLL(np._core._multiarray_umath.__file__)  # type: ignore[attr-defined]
    except (AttributeError, OSError):
        return lambda: 1, lambda _: None
    for begin in ("scipy_openblas", "openblas"):  # in NumPy's own wheels, and elsewhere
        for end in ("64_", ""):
            count = getattr(library, f"{begin}_get_num_threads{end}", None)
            change = getattr(library, f"{begin}_set_num_threads{end}", None)
            if count is not None and change is not None:
                count.restype, change.restype, change.argtypes = ctypes.c_int, None, [ctypes.c_int]
                return count, change
    return lambda: 1, lambda _: None


_one_thread = _OneThread()


def _taken(a: Tensor, b: Tensor, *more: Tensor) -> bool:
    """Whether a product is NumPy's: not where PyTorch is as fast, nor where it keeps a history."""
    if not one_by_one(a) or a.shape[1] * a.shape[2] * b.shape[2] < TINY:
        return False
    return not torch.is_grad_enabled() or not any(x.requires_grad for x in (a, b, *more))


def _array(x: Tensor) -> "np.ndarray[Any, Any]":
    """x as NumPy sees it, in the same memory if a library can read it there."""
    *_, row, column = x.stride()
    if 0 in (row, column) or 1 not in (row, column):
        x = x.contiguous()
    return (x.detach() if x.requires_grad else x).numpy()
