"""Much of x on a CPU, a block of positions at a time: PyTorch's taps to the bit, gradients too."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from vort.ops.short_convolution import short_convolution
from vort.ops.short_convolution.block import BLOCK, FEWEST, convolved, fits

# Several blocks; one; positions that fill none, and channels that fill no register.
SHAPES = [(8, 300, 192), (32, 64, 32), (3, 701, 66)]


def made(*shape: int, taps: int = 4) -> tuple[Tensor, Tensor]:
    x, weight = torch.randn(shape), torch.randn(shape[-1], taps)
    assert x.numel() >= FEWEST
    return x.requires_grad_(), weight.requires_grad_()


def pytorch(x: Tensor, weight: Tensor) -> Tensor:
    past = x.new_zeros(x.shape[0], weight.shape[1] - 1, x.shape[2])
    return F.silu(convolved(x, weight, torch.cat([past, x], 1)))


def ours(x: Tensor, weight: Tensor) -> Tensor:
    return short_convolution(x, weight)[0]


def test_cases_are_of_one_block_and_of_several() -> None:
    assert all(fits(*made(*shape)) for shape in SHAPES)
    larger = [torch.Size(shape).numel() > BLOCK * torch.get_num_threads() for shape in SHAPES]
    assert set(larger) == {True, False}


@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("back", ["dense", "strided"])
def test_output_and_gradients_are_those_of_pytorch_to_the_bit(
    shape: tuple[int, ...], taps: int, back: str
) -> None:
    x, weight = made(*shape, taps=taps)
    dy = torch.randn(shape)
    dy = dy if back == "dense" else dy.transpose(0, 1).contiguous().transpose(0, 1)
    wanted, got = pytorch(x, weight), ours(x, weight)
    assert torch.equal(got, wanted)
    found, truth = (torch.autograd.grad(y, (x, weight), dy) for y in (got, wanted))
    assert all(torch.equal(*pair) for pair in zip(found, truth, strict=True))


def test_second_derivatives_are_those_of_pytorch() -> None:
    x, weight = made(2, 300, 64)
    found = []
    for convolution in (ours, pytorch):
        (dx,) = torch.autograd.grad(convolution(x, weight).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), (x, weight)))
    for pair in zip(*found, strict=True):
        torch.testing.assert_close(*pair)


def test_what_is_small_strided_or_in_another_type_is_left_to_pytorch() -> None:
    x, weight = made(2, 600, 64)
    assert fits(x, weight)
    assert not fits(x[:, :4], weight)
    assert not fits(x.transpose(0, 1).contiguous().transpose(0, 1), weight)
    assert not fits(x.double(), weight.double())
