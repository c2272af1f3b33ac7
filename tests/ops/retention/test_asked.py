"""Retention that is read at some positions: what it is at those of all, gradients too."""

from typing import Any

import pytest
import torch
from torch import Tensor

from vort.ops.asked import Asked, pick
from vort.ops.retention import retention
from vort.ops.retention.chunk import AskedInputs, op, retention_of_asked
from vort.ops.retention.chunk.pairs import pairs_pay

BATCH, LENGTH, KEYS = 3, 210, 32
GENTLE, STEEP = (1e-3, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0), (1e-3, 0.1, 2.0, 30.0)


def positions(count: int) -> Asked:
    index = torch.randperm(BATCH * LENGTH, generator=torch.Generator().manual_seed(1))[:count]
    return Asked(index, BATCH, LENGTH)


def drawn(decays: tuple[float, ...], read: bool, heads: int, dtype: torch.dtype) -> list[Any]:
    torch.manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.rand(BATCH, LENGTH, heads, *shape, dtype=dtype).requires_grad_()

    q, k, v = (draw(KEYS) for _ in range(3))
    write = draw(len(decays))
    log_decay = -torch.tensor(decays, dtype=dtype).repeat(heads, 1)
    return [q, k, v, write, log_decay.requires_grad_(), draw(len(decays)) if read else None]


def answers(given: list[Any], asked: Asked, **options: Any) -> Tensor:
    q, k, v, write, log_decay, read = given
    read = None if read is None else pick(read, asked)
    tensors = (pick(q, asked), k, v, write, log_decay, read)
    settings = {"normalizer": "decayed", "include_self": True, "eps": 1e-6, **options}
    found = retention_of_asked(AskedInputs(*tensors, *asked, **settings, tracked=True))
    return found[: len(asked.places)]


def truth(given: list[Any], asked: Asked, backend: Any, **options: Any) -> Tensor:
    *tensors, read = given
    settings = {"eps": 1e-6, **options}
    o, _ = retention(*tensors, read=read, backend=backend, **settings)
    return o.flatten(0, 1)[asked.places]


def gradients(output: Tensor, given: list[Any]) -> list[Tensor]:
    back = torch.randn(output.shape, generator=torch.Generator().manual_seed(2), dtype=output.dtype)
    return list(torch.autograd.grad(output, [x for x in given if x is not None], back))


CASES = [
    (GENTLE, True, {}),
    (GENTLE, False, {}),
    (STEEP, True, {}),  # within a block, weights are summed directly
    ((0.02,), False, {}),  # a normaliser of one row
    (GENTLE, True, {"normalizer": "undecayed"}),
    (GENTLE, False, {"normalizer": "none"}),
    (GENTLE, True, {"include_self": False}),
]


@pytest.mark.parametrize(("decays", "read", "options"), CASES)
@pytest.mark.parametrize("count", [1, 40, 300])
def test_answers_are_those_of_the_exact_sum(
    road: str, decays: tuple[float, ...], read: bool, options: dict[str, Any], count: int
) -> None:
    given, asked = drawn(decays, read, 2, torch.float64), positions(count)
    found, expected = answers(given, asked, **options), truth(given, asked, "exact", **options)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    for one, other in zip(gradients(found, given), gradients(expected, given), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


@pytest.mark.usefixtures("torch_road")
@pytest.mark.parametrize(("decays", "read", "options"), CASES)
@pytest.mark.parametrize("heads", [1, 2])
def test_answers_are_those_of_all_positions_to_the_bit(
    decays: tuple[float, ...], read: bool, options: dict[str, Any], heads: int
) -> None:
    """What is trained on a few positions is what was trained before others were left out."""
    given, asked = drawn(decays, read, heads, torch.float32), positions(40)
    found, expected = answers(given, asked, **options), truth(given, asked, "chunk", **options)
    assert torch.equal(found, expected)
    for one, other in zip(gradients(found, given), gradients(expected, given), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("count", "pay"), [(30, True), (500, False)])
def test_pairs_are_summed_where_they_pay(
    road: str, count: int, pay: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = {"_of_pairs": "pairs", "_of_asked": "states"}
    taken: list[str] = []
    for name, way in ways.items():
        called = getattr(op, name)
        monkeypatch.setattr(op, name, lambda x, c=called, w=way: (taken.append(w), c(x))[1])
    given, asked = drawn((0.02,), False, 1, torch.float32), positions(count)
    answers(given, asked)
    assert taken == ["pairs" if pay and road == "numpy" else "states"]


def test_pairs_pay_for_few_readers_and_no_more_than_memory_holds() -> None:
    def of(readers: int, length: int = 1000, scales: int = 8) -> bool:
        k, write = torch.empty(8, length, 1, 32), torch.empty(8, length, 1, scales)
        # of one sequence alone: the others have slots for as many
        places = torch.arange(readers) + 3 * length
        tensors = (k, k, k, write, torch.empty(scales), None, places)
        return pairs_pay(AskedInputs(*tensors, 8, length, "decayed", True, 1e-6, True))

    assert of(32)
    assert of(200)
    assert not of(204)
    assert of(111, scales=1)
    assert not of(120, scales=1)
    assert of(100, length=10_000)
    assert not of(100, length=11_000)


def test_second_derivatives_are_those_of_the_exact_sum() -> None:
    given, asked = drawn(GENTLE[:3], True, 1, torch.float64), positions(9)
    found = []
    for output in (answers(given, asked), truth(given, asked, "exact")):
        (dk,) = torch.autograd.grad(output.square().sum(), given[1], create_graph=True)
        found.append(torch.autograd.grad(dk.square().sum(), given[0])[0])
    torch.testing.assert_close(*found)
