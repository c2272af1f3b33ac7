"""Parts of a call in threads of their own: the same bits, no lost error, no lost thread."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch
from torch import Tensor

from vort.ops import products, side_by_side
from vort.ops.local_attention import block
from vort.ops.retention import retention
from vort.ops.retention.chunk import op
from vort.ops.side_by_side import run_side_by_side, threads_here


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def counted(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parts each call of a module's op has had."""
    parts: list[int] = []

    def run(work: list[object]) -> None:
        parts.append(len(work))
        run_side_by_side(work)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "run_side_by_side", run)
    return parts


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
    parts = counted(op, monkeypatch)
    monkeypatch.setattr(op, "LARGE", 1 << 17)
    monkeypatch.setattr(op, "LARGE_BY_ONE", 1 << 17)
    found = _train(shape, packed, gated, normalizer)
    assert parts == [2, 2]  # forward and backward
    torch.set_num_threads(1)
    expected = _train(shape, packed, gated, normalizer)
    assert parts == [2, 2]
    assert len(found) == len(expected)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("kv_heads", [2, 3, 6])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("bounded", [False, True])
def test_heads_of_a_window_side_by_side_are_those_of_one_thread(
    kv_heads: int, entropy: bool, bounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = counted(block, monkeypatch)
    monkeypatch.setattr(products, "ONE_BY_ONE", True)
    monkeypatch.setattr(block, "LARGE", 2**14)
    q = torch.randn(2, 150, 6, 8)
    k, v = torch.randn(2, 170, kv_heads, 8), torch.randn(2, 170, kv_heads, 12)
    start = torch.arange(150) // 60 * 60 if bounded else None
    valid = torch.rand(2, 170) > 0.2 if bounded else None
    weights = torch.randn(2, 150, 6, 12), torch.randn(2, 150, 6)

    def train() -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        options = {"scale": 0.3, "start": start, "valid": valid, "return_entropy": entropy}
        o, found = block.attend_blockwise(*leaves, 20, **options)  # type: ignore[arg-type]
        loss = (o * weights[0]).sum()
        if found is not None:
            loss = loss + (found * weights[1]).sum()
        return [o, *([] if found is None else [found]), *torch.autograd.grad(loss, leaves)]

    apart = train()
    assert parts == [2, 2]  # forward and backward
    torch.set_num_threads(1)
    for got, wanted in zip(apart, train(), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    assert parts == [2, 2]


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


def test_a_thread_that_began_in_inference_mode_may_train() -> None:
    q, write = torch.rand(1, 90, 2, 16), torch.rand(1, 90, 2, 5)
    log_decay, bounds = -torch.logspace(-3, 0, 5) / 3, torch.tensor([0, 40, 90])

    def work() -> list[Tensor]:
        with torch.inference_mode():  # the first that this thread is asked for
            retention(q, q, q, write, log_decay, cu_seqlens=bounds, backend="chunk")
        leaf = q.clone().requires_grad_()
        o, _ = retention(leaf, leaf, leaf, write, log_decay, cu_seqlens=bounds, backend="chunk")
        return [o.detach(), *torch.autograd.grad(o.square().sum(), leaf)]

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(work).result(60)
    for got, wanted in zip(found, work(), strict=True):
        assert torch.equal(got, wanted)
