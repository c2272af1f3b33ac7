"""Gradients that come together: one product where they do, the same numbers where they do not."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.ops.interpreter import needs_triton
from vort.ops.gpu.together import Together, room_for

WIDTHS = (16, 8, 24)


class _Doubled(torch.autograd.Function):
    """2 x, whose gradient is written into the room there is for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return room_for(ctx.saved_tensors[0]).copy_(2 * grad)


def _leaves() -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    options: Any = {"dtype": torch.float64, "requires_grad": True}
    x = torch.randn(2, 5, 12, **options)
    return x, [torch.randn(n, 12, **options) for n in WIDTHS]


def _loss(parts: list[Tensor]) -> Tensor:
    return torch.stack([y.square().sum() for y in parts]).sum()


def _products(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    from vort.ops.linear.triton import products_fused

    return list(products_fused(x, [[w] for w in weights], None, None, 0.0)[2:])


@needs_triton
@pytest.mark.parametrize("alone", [(), (1,), (0, 2)])
def test_gradients_are_the_same_wherever_they_are_written(alone: tuple[int, ...]) -> None:
    x, weights = _leaves()
    _loss([2 * (x @ w.T) for w in weights]).backward()
    expected = [t.grad for t in (x, *weights)]
    x, weights = _leaves()
    parts = _products(x, weights)
    loss = _loss([2 * y if i in alone else _Doubled.apply(y) for i, y in enumerate(parts)])
    with mock.patch.object(Together, "whole", autospec=True, side_effect=Together.whole) as whole:
        loss.backward()
    assert whole.call_count == 1
    for t, wanted in zip((x, *weights), expected, strict=True):
        torch.testing.assert_close(t.grad, wanted)


@needs_triton
def test_all_in_their_places_are_one_product() -> None:
    x, weights = _leaves()
    loss = _loss([_Doubled.apply(y) for y in _products(x, weights)])
    found = []

    def whole(self: Together, grads: list[Tensor]) -> Tensor | None:
        found.append(original(self, grads))
        return found[-1]

    original = Together.whole
    with mock.patch.object(Together, "whole", whole):
        loss.backward()
    assert [None if x is None else x.shape for x in found] == [(10, sum(WIDTHS))]


@needs_triton
def test_gradients_that_somebody_holds_are_not_overwritten() -> None:
    x, weights = _leaves()
    parts = _products(x, weights)
    loss = _loss([_Doubled.apply(y) for y in parts])
    (held,) = torch.autograd.grad(loss, parts[1], retain_graph=True)
    before = held.clone()
    (3 * loss).backward(retain_graph=True)
    assert torch.equal(held, before)
    first = [t.grad.clone() for t in (x, *weights) if t.grad is not None]
    (3 * loss).backward()
    for t, once in zip((x, *weights), first, strict=True):
        torch.testing.assert_close(t.grad, 2 * once)
