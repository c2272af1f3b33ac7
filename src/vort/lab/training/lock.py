"""One run at a time in a folder: whoever comes second is refused before it writes anything."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vort.lab.launcher import rank

__all__ = ["hold", "is_held"]

NAME = "run.lock"
_held: set[Path] = set()


@contextmanager
def hold(folder: str | Path | None) -> Iterator[None]:
    """Keep other processes from training in `folder`, which is made if it is not there.

    The lock is the system's, on a file with the number of the process that holds it: it ends with
    the process, however that ends, so a file that was left behind stops nobody. None, a folder
    that this process holds already, and the helping processes of a run lock nothing.
    """
    place = None if folder is None else Path(folder).resolve()
    if place is None or place in _held or rank() != 0:
        yield
        return
    file = place / NAME
    made = _make(place)
    try:
        handle = _lock(file, folder)
    except BaseException:
        _unmake(made)
        raise
    _held.add(place)
    try:
        yield
    finally:
        _held.discard(place)
        # Removed while it is still held: nobody can have come to hold this file in between.
        with suppress(OSError):
            file.unlink()
        os.close(handle)
        _unmake(made)


def is_held(folder: str | Path) -> bool:
    """Whether a process is training in a folder."""
    import fcntl

    try:
        handle = os.open(Path(folder) / NAME, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def _lock(file: Path, folder: str | Path | None) -> int:
    import fcntl

    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
            os.close(handle)
            raise FileExistsError(
                f"process {holder} is training in {folder}: wait for it, or take another folder"
            ) from None
        except OSError:  # a file system without locks: nothing to be had, nothing to be lost
            return handle
        with suppress(FileNotFoundError):
            # The holder before may have removed the file between the two calls above.
            if os.fstat(handle).st_ino == file.stat().st_ino:
                with suppress(OSError):  # a full disk: the number is for people alone
                    os.ftruncate(handle, 0)
                    os.write(handle, f"{os.getpid()}\n".encode())
                return handle
        os.close(handle)


def _make(folder: Path) -> list[Path]:
    """Make a folder and those it is in; returns the new ones, innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _unmake(folders: list[Path]) -> None:
    """Remove folders that were made and never came to hold anything."""
    for folder in folders:
        with suppress(OSError):  # not empty
            folder.rmdir()
