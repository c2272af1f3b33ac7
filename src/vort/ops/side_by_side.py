"""Independent parts of one call, each in a thread of its own, on a CPU.

An op that runs on two threads waits for the slower one at its end. A program of many short ops
waits many times, and beside other programs, when one of its threads has to queue for a core, each
wait is as long as the queue. Parts that do not need each other wait once, at the end of all.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier, Lock

import torch

__all__ = ["cut", "run_side_by_side", "threads_here"]

_crews: dict[tuple[int, int], ThreadPoolExecutor] = {}
_lock = Lock()


def threads_here() -> int:
    """How many threads an op of this thread may use; 1 where parts cannot go to others."""
    # Modes belong to a thread: what watches or changes ops here would miss those of a part.
    modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    if modes or not torch.backends.openmp.is_available():
        return 1
    return torch.get_num_threads()


def cut(count: int, parts: int) -> list[slice]:
    """So many parts of `count` things in a row, as equal as can be.

    >>> cut(5, 2)
    [slice(0, 2, None), slice(2, 5, None)]
    """
    return [slice(count * i // parts, count * (i + 1) // parts) for i in range(parts)]


def run_side_by_side(parts: Sequence[Callable[[], None]]) -> None:
    """Call all parts at once, each in a thread of its own, and wait for them.

    The threads that an op may use here are dealt out among them. Gradients are not recorded. An
    error of a part is raised here when all have ended.
    """
    inference, crew = torch.is_inference_mode_enabled(), _crew(len(parts))
    pending = [crew.submit(_run, part, inference) for part in parts]
    wait(pending)
    for part in pending:
        part.result()


def _run(part: Callable[[], None], inference: bool) -> None:
    with torch.inference_mode(inference), torch.no_grad():
        part()


def _crew(size: int) -> ThreadPoolExecutor:
    """So many threads, which share out those that an op may use here."""
    here = torch.get_num_threads()
    each = max(1, here // size)
    with _lock:
        crew = _crews.get((size, each))
        if crew is None:
            # Setting the number is not safe in several threads at once, in a forked process above
            # all: here first, then one after the other.
            torch.set_num_threads(here)
            crew, turn, everyone = ThreadPoolExecutor(size, "vort"), Lock(), Barrier(size)
            started = [crew.submit(_settle, each, turn, everyone) for _ in range(size)]
            wait(started)
            # How many an op may use is each thread's own, but new ones take what was set last.
            torch.set_num_threads(here)
            for thread in started:
                thread.result()
            _crews[size, each] = crew
        return crew


def _settle(threads: int, turn: Lock, everyone: Barrier) -> None:
    try:
        with turn:
            # A thread's first parallel op would set the number once more.
            torch.empty(1 << 16).zero_()
            torch.set_num_threads(threads)
    except BaseException:
        everyone.abort()
        raise
    everyone.wait()  # so that nobody settles twice


def _forget() -> None:
    """A process that was forked has none of these threads."""
    global _lock
    _crews.clear()
    _lock = Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
