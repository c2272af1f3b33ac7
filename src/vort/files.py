"""Files written whole or not at all, and files of others read with care: the one way for each."""

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

__all__ = ["read_regular", "write_atomically"]


def read_regular(path: Path, within: Path | None = None) -> bytes:
    """The contents of a file; OSError where it is a pipe, a device or a folder, none is waited for.

    within: a folder that no link may lead out of.
    """
    if within is not None and not path.resolve().is_relative_to(within.resolve()):
        raise OSError(f"{path.name} is a link that leads out of {within.resolve().name}")
    _refuse_odd(path, path.stat().st_mode)
    # What stands there may have changed since; with O_NONBLOCK not even a pipe keeps us.
    file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(file, "rb") as stream:
        _refuse_odd(path, os.fstat(file).st_mode)
        return stream.read()


def _refuse_odd(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        kind = kinds.get(stat.S_IFMT(mode), "a device")
        raise OSError(f"{path.name} must be a file, not {kind}")


def write_atomically(path: Path, data: bytes | str) -> None:
    """Replace `path` by a file with `data` that is already safe on the disk.

    Whoever reads `path`, at any time, finds the former contents or these, complete; a process
    killed on the way leaves nothing else behind. The folder must exist; a text is stored as UTF-8.
    An OSError names `path`, whatever file it came of.
    """
    data = data.encode() if isinstance(data, str) else data
    try:
        _write(path, path.with_name(f".{path.name}.{os.getpid()}"), data)
    except OSError as problem:
        if problem.errno is None:
            raise
        raise OSError(problem.errno, problem.strerror, str(path)) from problem


def _write(path: Path, complete: Path, data: bytes) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        if not _write_unnamed(folder, complete, data):
            with complete.open("wb") as stream:
                _write_through(stream, data)
        os.replace(complete, path)
        os.fsync(folder)
    finally:
        os.close(folder)
        with suppress(OSError):  # where it could not be made, it need not go
            complete.unlink()


def _write_unnamed(folder: int, complete: Path, data: bytes) -> bool:
    """Write to a file that gets its name only when complete, where the system has such files.

    A process killed on the way then leaves nothing behind, not even a temporary file.
    """
    try:
        file = os.open(complete.parent, os.O_TMPFILE | os.O_WRONLY, 0o666)
    except (AttributeError, OSError):  # not Linux, or a file system without them
        return False
    with os.fdopen(file, "wb") as stream:
        _write_through(stream, data)
        complete.unlink(missing_ok=True)
        try:
            # Naming the folder makes Python call linkat, which follows the link in /proc.
            os.link(f"/proc/self/fd/{file}", complete, src_dir_fd=folder)
        except OSError:  # no /proc
            return False
    return True


def _write_through(stream: BinaryIO, data: bytes) -> None:
    stream.write(data)
    stream.flush()
    os.fsync(stream.fileno())
