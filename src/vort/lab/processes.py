"""Where processes that work side by side come from: forks of one that has loaded what they need.

To load a model's packages takes as long as many a cell; this way it is done once, and while the
command itself still loads its own. Also what each does with the memory it frees, and when it ends.
It is a file of its own because it must be there before torch.
"""

import ctypes
import multiprocessing
import os
import sys
import threading
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

__all__ = ["CELLS", "begin_loading", "end_with_parent", "keep_memory", "processes", "threads_alone"]

# What the work of cells needs.
CELLS = ("vort.lab.experiments.run", "vort.models", "accelerate")
# Where a driver of a GPU shows, for a process that has not loaded torch.
_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
# Of glibc's mallopt: what is freed at the end of the heap goes back beyond so many bytes, the heap
# grows by so many more than are asked for, and larger pieces than so many get pages of their own
# (older versions allow no more than the second number).
_MALLOPT = {-1: (2**31 - 1,), -2: (64 * 2**20,), -3: (2**30, 2**25)}
# What this process has told its own environment; the rest its user has.
_told: set[str] = set()


def begin_loading(modules: Sequence[str] = CELLS) -> None:
    """Let the process that forks start to load, beside this one; nothing where none may fork."""
    added = _one_thread()
    _told.update(added)
    os.environ.update(added)
    if sys.platform == "linux" and not any(Path(driver).exists() for driver in _DRIVERS):
        multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))
        forkserver.ensure_running()


def processes(modules: Sequence[str] = CELLS) -> tuple[Any, bool]:
    """A context of multiprocessing, and whether its processes start at once.

    A process that forks must have computed nothing yet, for torch's threads do not survive it, and
    have met no GPU; where there is one, and on other systems, each is started afresh.

    modules: what it loads, if it has not begun to.
    """
    import torch

    if sys.platform != "linux" or torch.cuda.is_available():
        return multiprocessing.get_context("spawn"), False
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(modules))
    added = _one_thread()
    os.environ.update(added)
    try:
        forkserver.ensure_running()
    finally:
        for name in added:
            del os.environ[name]
    return context, True


def _one_thread() -> dict[str, str]:
    """What the environment has to say, and does not yet, before a process loads numpy or torch.

    Each has a core: threads of products would only be in the way of one another, and some libraries
    of products (torch's on aarch64) never hear of `torch.set_num_threads`.
    """
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
    return {name: "1" for name in names if name not in os.environ}


def threads_alone() -> int:
    """Threads of a process that nothing runs beside: one for each core, or as its user has said."""
    given = "" if "OMP_NUM_THREADS" in _told else os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() else os.cpu_count() or 1


def end_with_parent() -> None:
    """Called in a worker: end when the command has gone, however it went.

    Nobody would take what it finds, and it would have a core for as long as that lasts.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="end with parent", daemon=True).start()


def keep_memory() -> None:
    """Have this process keep what it frees: a step that is given new pages waits for each of them.

    Known to glibc; with other C libraries nothing changes. What is computed does not depend on it.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        for parameter, values in _MALLOPT.items():
            any(library.mallopt(parameter, value) for value in values)  # the first it takes
