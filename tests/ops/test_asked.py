"""A few positions of many: the numbers of all of them, and gradients with the same bits."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from vort.ops import asked as module
from vort.ops.asked import Asked, heads_of_asked, linear_of_asked, norm_of_asked, pick
from vort.ops.rms_norm import rms_norm

BATCH, LENGTH, SIZE = 3, 700, 24


def some(count: int = 41) -> Asked:
    index = torch.randperm(BATCH * LENGTH, generator=torch.Generator().manual_seed(0))[:count]
    return Asked(index.sort().values, BATCH, LENGTH)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape).requires_grad_()


def test_rows_are_filled_up_with_zeros_and_gradients_go_where_rows_came_from() -> None:
    asked, x = some(), leaf(BATCH, LENGTH, 2, SIZE)
    found = pick(x, asked)
    assert len(found) == asked.rows == 64
    assert torch.equal(found[:41], x.flatten(0, 1)[asked.places])
    assert not found[41:].any()
    back = torch.randn_like(found)
    (dx,) = torch.autograd.grad(found, x, back)
    (truth,) = torch.autograd.grad(x.flatten(0, 1)[asked.places], x, back[:41])
    assert torch.equal(dx, truth)


@pytest.mark.usefixtures("torch_road")
@pytest.mark.parametrize("kept", [0, 1 << 22], ids=["made anew", "kept"])
def test_a_product_has_the_gradients_of_one_with_all_positions_to_the_bit(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT", kept)
    for count in (41, 50, 41):  # zeros that are lent come back as zeros
        asked, x, weight = some(count), leaf(BATCH, LENGTH, SIZE), leaf(18, SIZE)
        back = torch.randn(count, 18)
        rows = linear_of_asked(pick(x, asked), weight, asked)[:count]
        whole = F.linear(x, weight).flatten(0, 1)[asked.places]
        assert torch.equal(rows, whole)
        found, truth = (torch.autograd.grad(y, (x, weight), back) for y in (rows, whole))
        assert all(map(torch.equal, found, truth))


@pytest.mark.usefixtures("torch_road")
@pytest.mark.parametrize("heads", [1, 3])
def test_a_product_of_each_head_has_the_gradients_of_all_positions_to_the_bit(heads: int) -> None:
    for count in (41, 50, 41):
        asked, x, weight = some(count), leaf(BATCH, LENGTH, heads, SIZE), leaf(heads, SIZE, 16)
        back = torch.randn(count, heads, 16)
        rows = heads_of_asked(pick(x, asked), weight, asked)[:count]
        whole = torch.einsum("...hd,hdm->...hm", x, weight).flatten(0, 1)[asked.places]
        assert torch.equal(rows, whole)
        found, truth = (torch.autograd.grad(y, (x, weight), back) for y in (rows, whole))
        assert all(map(torch.equal, found, truth))


@pytest.mark.usefixtures("torch_road")
@pytest.mark.parametrize("heads", [(), (2,)])
def test_a_norm_has_the_gradients_of_one_of_all_positions_to_the_bit(heads: tuple[int]) -> None:
    """Beside a residual: three gradients come back to x, and their order counts."""
    asked, x, weight = some(), leaf(BATCH, LENGTH, *heads, SIZE), leaf(SIZE)
    back = torch.randn(41, *heads, SIZE)
    picked = pick(x * 1.5, asked)
    rows = (picked + norm_of_asked(picked, weight, 1e-6, asked).sin())[:41]
    every = x * 1.5
    whole = (every + rms_norm(every, weight, 1e-6).sin()).flatten(0, 1)[asked.places]
    assert torch.equal(rows, whole)
    found, truth = (torch.autograd.grad(y, (x, weight), back) for y in (rows, whole))
    assert all(map(torch.equal, found, truth))


def test_second_derivatives_are_those_of_all_positions() -> None:
    asked, x, weight, scale = some(), leaf(BATCH, LENGTH, SIZE), leaf(SIZE, SIZE), leaf(SIZE)
    rows = norm_of_asked(linear_of_asked(pick(x, asked), weight, asked), scale, 1e-6, asked)[:41]
    whole = rms_norm(F.linear(x, weight), scale, 1e-6).flatten(0, 1)[asked.places]
    found = []
    for y in (rows, whole):
        (dx,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), (x, weight, scale)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_without_zeros_gradients_are_those_of_all_positions_but_for_rounding(road: str) -> None:
    asked, x = some(), leaf(BATCH, LENGTH, 3, SIZE)
    weight, of_heads, norm = leaf(18, SIZE), leaf(3, SIZE, 16), leaf(SIZE)
    rows = pick(x, asked)
    whole = x.flatten(0, 1)[asked.places]
    pairs = [
        (linear_of_asked(rows[:, 0], weight, asked), F.linear(whole[:, 0], weight), weight),
        (heads_of_asked(rows, of_heads, asked), whole[:, :, None] @ of_heads, of_heads),
        (norm_of_asked(rows, norm, 1e-6, asked), rms_norm(whole, norm, 1e-6), norm),
    ]
    for one, other, parameter in pairs:
        back = torch.randn(len(whole), *one.shape[1:])
        found = torch.autograd.grad(one[: len(whole)], (x, parameter), back, retain_graph=True)
        truth = torch.autograd.grad(
            other, (x, parameter), back.view_as(other), retain_graph=True
        )  # fmt: skip
        torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-5)
