"""NumPy's library by one thread: for small matrices, which its own threads only wait over.

OpenBLAS shares out whatever is large enough to be worth it on an idle machine, and its threads wait
for each other, spinning, after every product. Where others are at work as well the one that is
waited for may not be running: a fit of nineteen rates took 54 s instead of 1.4.
"""

import ctypes
import os
from collections.abc import Callable
from contextlib import ContextDecorator
from threading import Lock

import numpy as np

__all__ = ["OneThread", "one_thread"]


class OneThread(ContextDecorator):
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


one_thread = OneThread()
