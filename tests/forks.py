"""Processes of their own, in no time: forks of one that has loaded what they need.

To load torch, Transformers and vort takes seconds of a core, which is not what most tests that need
a process are about.
"""

import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any, TextIO

# One process has imported everything, and others are forked from it.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.distributed.jobs", "tests.distributed.imports"])
# As `python -m vort`.
COMMAND = "from vort.cli import main; main()"


class Forked:
    """Python's code in a process of its own; as `subprocess.Popen([sys.executable, "-c", ...])`.

    Attributes:
        pid: of the process.
        stdout: what it writes, errors too; nothing where it has a terminal.
    """

    def __init__(
        self,
        code: str,
        *arguments: object,
        terminal: int | None = None,
        **environment: str,
    ) -> None:
        """Start it.

        Args:
            code: what it runs.
            arguments: in its `sys.argv`.
            terminal: a file descriptor that it has in place of all three streams.
            environment: added to that of the process it is forked from.
        """
        ours, theirs = SERVER.Pipe(duplex=False)
        if terminal is not None:
            theirs.close()
            theirs = Connection(os.dup(terminal))
        given = code, [str(x) for x in arguments], terminal is not None, environment
        self._process = SERVER.Process(target=_run, args=(theirs, *given))
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self.stdout: TextIO = os.fdopen(os.dup(ours.fileno()))
        ours.close()

    def send_signal(self, which: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, which)

    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.is_alive()

    def wait(self, seconds: float = 120.0) -> int:
        """Its exit status, once it has ended: minus the signal that ended it, if one did."""
        self._process.join(seconds)
        status = self._process.exitcode
        assert status is not None, f"still running after {seconds} seconds"
        return status

    def end(self) -> None:
        """Kill it if it is still there."""
        self._process.kill()
        self._process.join()
        self.stdout.close()


def _run(
    end: Connection,
    code: str,
    arguments: list[str],
    terminal: bool,
    environment: dict[str, str],
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (0, 1, 2) if terminal else (1, 2):
        os.dup2(end.fileno(), stream)
    end.close()
    if terminal:
        os.setsid()
        sys.stdin = os.fdopen(0, closefd=False)
    for name, stream in (("stdout", 1), ("stderr", 2)):
        setattr(sys, name, os.fdopen(stream, "w", 1 if terminal else -1, closefd=False))
    # What it starts itself comes as in any program.
    multiprocessing.set_start_method(None, force=True)
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<forked>", "exec"), {"__name__": "__main__"})


def output_of(code: str, *arguments: object, **environment: str) -> str:
    """What code writes that ends without an error."""
    process: Any = Forked(code, *arguments, **environment)
    try:
        said: str = process.stdout.read()
        assert process.wait(300) == 0, said[-4000:]
    finally:
        process.end()
    return said
