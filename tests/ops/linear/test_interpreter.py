"""Products with their neighbours: the PyTorch forms, when weights may be used past their modules,
and the kernels in Triton's interpreter.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.ops.interpreter import check_in_interpreter, claims_of, needs_triton
from vort.ops.linear import (
    Norm,
    gated_mlp,
    gated_norm_linear,
    is_plain,
    linear_cross_entropy,
    products,
)
from vort.ops.rms_norm import rms_norm


@needs_triton
@pytest.mark.parametrize("claim", claims_of("linear"))
def test_kernels_in_the_interpreter(claim: str) -> None:
    check_in_interpreter("linear", claim)


def test_on_a_cpu_each_is_what_its_equation_says() -> None:
    x, w = torch.randn(2, 5, 12), torch.randn(7, 12)
    scale = Norm(torch.randn(12), 1e-6)
    same, normed, y, z = products(x, [w, w[:3]], [w], norm=scale)
    assert same is x
    assert torch.equal(normed, rms_norm(x, *scale))
    assert torch.equal(y, F.linear(normed, torch.cat([w, w[:3]])))
    assert torch.equal(z, F.linear(normed, w))
    total, normed = products(x, delta=x, norm=scale)
    assert torch.equal(total, x + x)
    assert torch.equal(normed, rms_norm(x + x, *scale))
    total, y = gated_mlp(x, w, 2 * w, w.T, delta=x, norm=scale)
    read = rms_norm(x + x, *scale)
    assert torch.equal(total, x + x)
    torch.testing.assert_close(y, (F.silu(read @ w.T) * (read @ w.T * 2)) @ w)
    heads, norm = torch.randn(2, 5, 3, 4), torch.randn(4)
    wanted = F.linear(rms_norm(heads + heads, norm).flatten(2) * F.silu(x), w)
    found = gated_norm_linear(heads, w, other=heads, gate=x, norm=norm)
    torch.testing.assert_close(found, wanted)


def test_the_loss_leaves_out_what_is_ignored() -> None:
    x, w = torch.randn(6, 4), torch.randn(9, 4)
    targets = torch.tensor([3, -100, 8, 0, -100, 1])
    wanted = F.cross_entropy(F.linear(x, w), targets, reduction="sum")
    torch.testing.assert_close(linear_cross_entropy(x, w, targets), wanted)
    assert linear_cross_entropy(x, w, torch.full((6,), -100)) == 0


@pytest.mark.parametrize("shape", [(3, 2), (6,), (2, 3, 1), ()])
def test_the_loss_refuses_targets_that_are_not_one_for_each_row(shape: tuple[int, ...]) -> None:
    targets = torch.zeros(shape, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"targets must be \[2, 3\] to go with x, got \["):
        linear_cross_entropy(torch.randn(2, 3, 4), torch.randn(9, 4), targets)


def test_the_loss_of_float64_is_float64() -> None:
    x, w = torch.randn(2, 3, 4).double().requires_grad_(), torch.randn(9, 4).double()
    targets = torch.randint(9, (2, 3))
    assert linear_cross_entropy(x, w, targets).dtype == torch.float64
    assert torch.autograd.gradcheck(lambda x, w: linear_cross_entropy(x, w, targets), (x, w))
    assert linear_cross_entropy(x.bfloat16(), w.bfloat16(), targets).dtype == torch.float32


def test_modules_are_called_on_a_cpu() -> None:
    assert not is_plain(torch.randn(2, 5, 4), nn.Linear(4, 4, bias=False))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["hook", "bias", "subclass"])
def test_modules_that_do_more_than_multiply_are_called(kind: str) -> None:
    linear: nn.Module = nn.Linear(4, 4, bias=kind == "bias").cuda()
    if kind == "hook":
        linear.register_forward_hook(lambda *given: None)
    if kind == "subclass":
        linear = type("Adapted", (nn.Linear,), {})(4, 4, bias=False).cuda()
    x = torch.randn(2, 5, 4, device="cuda")
    assert is_plain(x, nn.Linear(4, 4, bias=False).cuda(), None)
    assert not is_plain(x, linear)
