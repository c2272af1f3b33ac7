"""Parts of a call in threads of their own: the same bits, no lost error, no lost thread."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from vort.ops import side_by_side
from vort.ops.retention import retention
from vort.ops.retention.chunk import op
from vort.ops.side_by_side import run_side_by_side, threads_here


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _train(shape: tuple[int, ...], packed: bool, gated: bool, normalizer: str) -> list[Tensor]:
    batch, length, heads, keys, values, scales = shape
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.rand(size, generator=generator).requires_grad_()

    q, k = draw(batch, length, heads, keys), draw(batch, length, heads, keys)
    v, write = draw(batch, length, heads, values), draw(batch, length, heads, scales)
    log_decay = (-torch.logspace(-3, 0.8, scales) * draw(heads, 1)).detach().requires_grad_()
    read = draw(batch, length, heads, scales) if gated else None
    bounds = torch.tensor([0, 70, 70, 200, length]) if packed else None
    o, state = retention(
        q,
        k,
        v,
        write,
        log_decay,
        read=read,
        normalizer=normalizer,  # type: ignore[arg-type]
        cu_seqlens=bounds,
        output_final_state=True,
        backend="chunk",
    )
    assert state is not None
    outputs = [x for x in (o, *state) if x is not None]
    torch.autograd.backward(outputs, [torch.randn(x.shape, generator=generator) for x in outputs])
    leaves = [x for x in (q, k, v, write, log_decay, read) if x is not None]
    return [*outputs, *(x.grad for x in leaves if x.grad is not None)]


@pytest.mark.parametrize("normalizer", ["decayed", "undecayed", "none"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("shape", "packed"),
    [
        ((1, 1000, 4, 32, 32, 8), False),
        ((1, 1000, 4, 32, 32, 8), True),
        ((2, 777, 3, 24, 40, 6), False),  # parts of one head and of two
        ((8, 256, 2, 32, 32, 12), False),
    ],
)
def test_heads_side_by_side_give_the_bits_of_one_thread(
    shape: tuple[int, ...],
    packed: bool,
    gated: bool,
    normalizer: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts: list[int] = []

    def counted(work: list[object]) -> None:
        parts.append(len(work))
        run_side_by_side(work)  # type: ignore[arg-type]

    monkeypatch.setattr(op, "run_side_by_side", counted)
    monkeypatch.setattr(op, "LARGE", 1 << 17)
    monkeypatch.setattr(op, "LARGE_BY_ONE", 1 << 17)
    found = _train(shape, packed, gated, normalizer)
    assert parts == [2, 2]  # forward and backward
    torch.set_num_threads(1)
    expected = _train(shape, packed, gated, normalizer)
    assert parts == [2, 2]
    assert len(found) == len(expected)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_parts_run_in_inference_mode_too() -> None:
    q = torch.rand(1, 600, 2, 32)
    write, log_decay = torch.rand(1, 600, 2, 8), -torch.logspace(-3, 0, 8)
    with torch.inference_mode():
        found, _ = retention(q, q, q, write, log_decay)
    assert torch.equal(found, retention(q, q, q, write, log_decay)[0])


def test_each_part_has_one_thread_and_nobody_else_loses_any() -> None:
    seen: dict[str, int] = {}

    def look(name: str) -> None:
        torch.rand(1 << 17).exp()  # a parallel op: a thread's first one sets its number
        seen[name] = torch.get_num_threads()

    run_side_by_side([lambda: look("first"), lambda: look("second")])
    look("here")
    later = threading.Thread(target=look, args=("later",))
    later.start()
    later.join()
    assert seen == {"first": 1, "second": 1, "here": 2, "later": 2}


def test_an_error_of_a_part_is_raised_when_all_have_ended() -> None:
    ended = threading.Event()
    failed = threading.Event()

    def fail() -> None:
        failed.set()
        raise ValueError("a part failed")

    def go_on() -> None:
        failed.wait(10)
        ended.set()

    with pytest.raises(ValueError, match="a part failed"):
        run_side_by_side([fail, go_on])
    assert ended.is_set()


def test_what_watches_this_thread_sees_every_op() -> None:
    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    assert threads_here() == 2
    with Watch():  # type: ignore[no-untyped-call]
        assert threads_here() == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own() -> None:
    run_side_by_side([lambda: None, lambda: None])
    assert side_by_side._crews
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a child that waits for threads it does not have would wait for ever
        worked: list[int] = []
        run_side_by_side([lambda: worked.append(1), lambda: worked.append(2)])
        os._exit(0 if sorted(worked) == [1, 2] else 1)
    assert os.waitpid(child, 0)[1] == 0
