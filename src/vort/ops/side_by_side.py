"""Independent parts of one call, each in a thread of its own, on a CPU.

An op that runs on two threads waits for the slower one at its end. A program of many short ops
waits many times, and beside other programs, when one of its threads has to queue for a core, each
wait is as long as the queue. Parts that do not need each other wait once, at the end of all.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

__all__ = ["may_run_side_by_side", "run_side_by_side"]

_crews: dict[int, ThreadPoolExecutor] = {}
_lock = threading.Lock()


def may_run_side_by_side() -> int:
    """How many parts are worth making here: the threads an op may use, 1 where none helps."""
    # A part is another thread: whatever watches this thread's ops would not see it.
    watched = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    if watched or not torch.backends.openmp.is_available():
        return 1
    return torch.get_num_threads()


def run_side_by_side(work: Callable[[int], None], parts: int) -> None:
    """Call work(0) to work(parts - 1) at once, each in one thread, and wait for all.

    Gradients are not recorded. An error of any part is raised here, after all have ended.
    """
    inference = torch.is_inference_mode_enabled()

    def alone(index: int) -> None:
        with torch.inference_mode(inference), torch.no_grad():
            work(index)

    pending = [_crew(parts).submit(alone, index) for index in range(parts)]
    errors = [error for error in (part.exception() for part in pending) if error is not None]
    if errors:
        raise errors[0]


def _crew(size: int) -> ThreadPoolExecutor:
    """So many threads whose ops take one thread each."""
    with _lock:
        crew = _crews.get(size)
        if crew is None:
            crew = _crews[size] = ThreadPoolExecutor(size, "vort")
            everyone = threading.Barrier(size)
            for started in [crew.submit(_settle, everyone) for _ in range(size)]:
                started.result()
            # The number of threads is each thread's own, but new ones inherit what was set last.
            torch.set_num_threads(torch.get_num_threads())
        return crew


def _settle(everyone: threading.Barrier) -> None:
    torch.empty(1 << 16).zero_()  # a thread's first parallel op would set its number again
    torch.set_num_threads(1)
    everyone.wait()


def _forget() -> None:
    """A process that was forked has none of these threads."""
    global _lock
    _crews.clear()
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
