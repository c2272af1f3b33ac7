"""Several processes that train together: what they agree on, and what if one of them is gone."""

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from vort.lab.launcher import processes, rank
from vort.lab.training.lock import is_held

__all__ = ["LostPeerError", "shared", "training_device", "watching"]

T = TypeVar("T")
# What gloo and NCCL say when nobody answers; both raise RuntimeErrors of several kinds.
_GONE = re.compile(
    r"gloo|nccl|connection (was )?(closed|reset)|broken pipe|peer|socket|timed out", re.IGNORECASE
)


class LostPeerError(ConnectionError):
    """Another process of the run has ended, and this one cannot go on without it."""


def training_device() -> torch.device:
    """Where Accelerate will train."""
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def shared(value: T) -> T:
    """The first process's value, in all of them: what is measured differs from one to another."""
    if processes() == 1:
        return value
    from accelerate import PartialState  # type: ignore[import-untyped, unused-ignore]
    from accelerate.utils import (  # type: ignore[import-untyped, unused-ignore]
        broadcast_object_list,
    )

    PartialState(cpu=training_device().type == "cpu")
    found: list[Any] = [value]
    broadcast_object_list(found)
    result: T = found[0]
    return result


@contextmanager
def watching(folder: Path) -> Iterator[None]:
    """Turn the end of another process into `LostPeerError`, raised where it should be said.

    A launcher that sees one process end terminates the others: that counts as well. The first
    process says it; if that one is gone, and its lock on `folder` with it, the second.
    """
    if processes() == 1:
        yield
        return

    def ended(number: int, frame: object) -> None:
        raise LostPeerError("the launcher has ended it")

    main = threading.current_thread() is threading.main_thread()
    former = signal.signal(signal.SIGTERM, ended) if main else None
    try:
        yield
    except LostPeerError as problem:
        _tell(folder, str(problem), problem)
    except RuntimeError as problem:
        text = str(problem)
        if not isinstance(problem, torch.distributed.DistError) and not _GONE.search(text):
            raise
        _tell(folder, text, problem)
    finally:
        if main:
            signal.signal(signal.SIGTERM, former)


def _tell(folder: Path, reason: str, cause: BaseException) -> None:
    from vort.lab.training.checkpoint import latest_checkpoint

    speaks = rank() == 0 or (rank() == 1 and not is_held(folder))
    if not speaks:
        raise SystemExit(2) from cause
    found = latest_checkpoint(folder)
    saved = "nothing was saved yet" if found is None else f"{found.name} is whole"
    first = (reason.strip().splitlines() or [""])[0]
    raise LostPeerError(
        f"another process of this run is gone ({first[:120]}); {saved}: start the same command "
        "with --resume to go on"
    ) from cause
