"""Processes that work side by side are forks of one that has loaded what they need."""

import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from vort.lab import processes as own
from vort.lab.processes import keep_memory, threads_alone

SCRIPT = """
import os, sys
from vort.lab.processes import begin_loading, processes

def tell(answers):
    answers.send(("colorsys" in sys.modules, os.getppid()))

if __name__ == "__main__":
    begin_loading(("colorsys", "torch"))
    assert "torch" not in sys.modules  # the other begins before this one has to
    context, quick = processes()
    assert quick
    for _ in range(2):
        here, there = context.Pipe()
        process = context.Process(target=tell, args=(there,))
        process.start()
        print(*here.recv())
        process.join()
"""


@pytest.mark.skipif(
    sys.platform != "linux" or torch.cuda.is_available(), reason="here each is started afresh"
)
def test_a_process_has_what_the_one_it_comes_from_has_loaded(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    (first, parent), (second, same) = (line.split() for line in run.stdout.splitlines())
    assert first == second == "True"
    assert parent == same


THREADS = """
import os, sys
from vort.lab.processes import begin_loading, processes

def tell(answers):
    answers.send(os.environ.get("OMP_NUM_THREADS"))

def say(begins, given):
    os.environ.update({"OMP_NUM_THREADS": given} if given else {})
    if begins:
        begin_loading(())
    context, _ = processes(())
    here, there = context.Pipe()
    process = context.Process(target=tell, args=(there,))
    process.start()
    print(begins, given, here.recv(), os.environ.get("OMP_NUM_THREADS"), flush=True)
    process.join()

if __name__ == "__main__":
    import torch  # once for all four

    for begins in (False, True):
        for given in (None, "3"):
            if not os.fork():
                say(begins, given)
                sys.exit()  # and its processes with it
            assert os.wait()[1] == 0
"""


@pytest.mark.skipif(
    sys.platform != "linux" or torch.cuda.is_available(), reason="here each is started afresh"
)
def test_a_process_is_told_of_its_one_core_before_it_loads_anything(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(THREADS)
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    run = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True, env=environment
    )
    # Whether it began to load, what its user has said, and what is said there and here then.
    assert run.stdout.splitlines() == [
        "False None 1 None",
        "False 3 3 3",
        "True None 1 1",
        "True 3 3 3",
    ]


def test_a_process_alone_has_every_core_unless_its_user_has_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    monkeypatch.setattr(own, "_told", set())
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_alone() == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert threads_alone() == 7
    # One, for workers, is what the command itself has put there.
    monkeypatch.setattr(own, "_told", {"OMP_NUM_THREADS"})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads_alone() == 7


WORKER = """
import os, time
from concurrent.futures import ProcessPoolExecutor
from vort.lab.processes import end_with_parent, processes

if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, processes(())[0], end_with_parent)
    print(pool.submit(os.getpid).result(), flush=True)
    pool.submit(time.sleep, 600)
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="asks for a process by its number")
def test_a_worker_ends_when_the_command_has_been_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WORKER)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        worker = int(command.stdout.readline())
        command.kill()
    last = time.monotonic() + 60
    while _runs(worker) and time.monotonic() < last:
        time.sleep(0.1)
    assert not _runs(worker)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{process}/stat")
    # One that has ended, and nobody has asked how, is still listed.
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif("glibc" not in platform.libc_ver(), reason="asks glibc")
def test_memory_that_is_kept_comes_without_new_pages() -> None:
    def new_pages() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            _ = [np.ones(2**19) for _ in range(8)]
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    child = os.fork()  # it is for a process as a whole
    if child == 0:
        usual = new_pages()
        keep_memory()
        new_pages()
        os._exit(not new_pages() < 0.1 * usual)
    assert os.waitpid(child, 0)[1] == 0
