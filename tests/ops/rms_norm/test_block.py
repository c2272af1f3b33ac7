"""Much of x on a CPU, a block of rows at a time: PyTorch's norm to the bit, whatever comes back."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from vort.ops.rms_norm import rms_norm
from vort.ops.rms_norm.block import BLOCK, FEWEST, fits

# One block and a part of another; one row of heads; rows that are no power of two.
SHAPES = [(5, 911, 64), (2, 2500, 1, 32), (9, 977, 20)]


def made(*shape: int) -> tuple[Tensor, Tensor]:
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    assert x.numel() >= FEWEST
    return x.requires_grad_(), weight.requires_grad_()


def pytorch(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def test_cases_are_of_several_blocks() -> None:
    assert all(fits(*made(*shape)) for shape in SHAPES)
    assert any(torch.Size(shape).numel() > BLOCK * torch.get_num_threads() for shape in SHAPES)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("back", ["dense", "strided"])
def test_output_and_gradients_are_those_of_pytorch_to_the_bit(
    shape: tuple[int, ...], back: str
) -> None:
    x, weight = made(*shape)
    dy = torch.randn(shape)
    dy = dy if back == "dense" else dy.transpose(0, 1).contiguous().transpose(0, 1)
    wanted, got = pytorch(x, weight), rms_norm(x, weight)
    assert torch.equal(got, wanted)
    found, truth = (torch.autograd.grad(y, (x, weight), dy) for y in (got, wanted))
    assert all(torch.equal(*pair) for pair in zip(found, truth, strict=True))


def test_beside_a_residual_gradients_are_added_up_in_the_same_order() -> None:
    """Three come back to x, and sums of three numbers depend on their order."""
    start, weight = made(*SHAPES[0])
    found = []
    for norm in (rms_norm, pytorch):
        x = start * 1.5
        y = x + norm(x, weight).sin()
        found.append(torch.autograd.grad(y.square().mean(), (start, weight)))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_second_derivatives_are_those_of_pytorch() -> None:
    x, weight = made(3, 2200, 20)
    found = []
    for norm in (rms_norm, pytorch):
        (dx,) = torch.autograd.grad(norm(x, weight).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), (x, weight)))
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())


def test_without_a_gradient_nothing_is_kept_and_the_bits_are_the_same() -> None:
    x, weight = made(*SHAPES[1])
    with torch.no_grad():
        got = rms_norm(x, weight)
    assert not got.requires_grad
    assert torch.equal(got, pytorch(x, weight))
    frozen = rms_norm(x, weight.detach())
    (dx,) = torch.autograd.grad(frozen.sum(), x)
    assert torch.equal(dx, torch.autograd.grad(pytorch(x, weight).sum(), x)[0])


def test_other_types_few_rows_and_autocast_are_left_to_pytorch() -> None:
    x, weight = made(*SHAPES[0])
    assert not fits(x[0, :9], weight)
    assert not fits(x.double(), weight)
    assert not fits(x.transpose(0, 1), weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert not fits(x, weight)
