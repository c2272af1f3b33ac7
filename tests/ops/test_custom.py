"""The wiring of all ops: an op of our own, called directly, as an operator and compiled."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from vort.ops.custom import Tensors, custom_op, traced, without_autocast


class Inputs(NamedTuple):
    x: Tensor
    weight: Tensor | None
    mask: Tensor | None
    factor: float
    with_sum: bool


kept_lengths: list[int] = []
wanted: list[list[bool]] = []


def _forward(inputs: Inputs) -> Tensors:
    x, weight, mask, factor, with_sum = inputs
    y = x * factor if weight is None else x * weight * factor
    y = y if mask is None else y * mask
    return y, x.sum(-1) if with_sum else None, x.cos(), x.sin()


def _backward(inputs: Inputs, kept: Tensors, grads: Tensors, needs: Sequence[bool]) -> Tensors:
    _, weight, mask, factor, _ = inputs
    kept_lengths.append(len(kept))
    wanted.append(list(needs))
    x = torch.arccos(kept[0])
    assert inputs.x is None
    dy, dsum = grads
    dy = torch.zeros_like(x) if dy is None else dy
    dy = dy if mask is None else dy * mask
    dx = dy * factor if weight is None else dy * weight * factor
    dx = dx if dsum is None else dx + dsum[..., None]
    return dx, None if weight is None else (dy * x * factor).sum(0)


def _shapes(inputs: Inputs) -> Tensors:
    x = inputs.x
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1]) if inputs.with_sum else None, x.cos()


toy = custom_op(
    "vort::test_toy_forward",
    Inputs,
    _forward,
    _backward,
    _shapes,
    outputs=("y", "sum", "cosine"),
    shown=2,
    saved=("cosine",),
    gradients=("x", "weight"),
    forget=("x",),
)


def leaves() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.rand(*s, generator=generator) for s in ((3, 4), (4,)))
    return x.requires_grad_(), weight.requires_grad_()


def loss(x: Tensor, weight: Tensor | None, mask: Tensor | None, with_sum: bool) -> Tensor:
    y, total = toy(Inputs(x, weight, mask, 2.0, with_sum))
    assert (total is None) == (not with_sum)
    return y.square().sum() if total is None else (y.square().sum(-1) * total).sum()


@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("with_sum", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_gradients_are_those_of_autograd(with_weight: bool, with_sum: bool, compiled: bool) -> None:
    x, weight = leaves()
    mask = (x > 0.3).float().detach()
    function = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
    given = (x, weight) if with_weight else (x,)
    found = torch.autograd.grad(function(x, weight if with_weight else None, mask, with_sum), given)
    y = x * (weight if with_weight else 1) * 2 * mask
    plain = (y.square().sum(-1) * x.sum(-1)).sum() if with_sum else y.square().sum()
    for ours, theirs in zip(found, torch.autograd.grad(plain, given), strict=True):
        torch.testing.assert_close(ours, theirs)
    # what follows the outputs is kept by the autograd function alone
    assert kept_lengths[-1] == (1 if compiled else 2)


def test_the_operator_obeys_torch_library() -> None:
    x, weight = leaves()
    for arguments in ((x, weight, None, 2.0, True), (x, None, None, 2.0, False)):
        torch.library.opcheck(torch.ops.vort.test_toy_forward.default, arguments)


def test_the_backward_is_told_what_is_wanted() -> None:
    x, weight = leaves()
    loss(x.detach(), weight, None, False).backward()
    assert wanted[-1] == [False, True]
    assert weight.grad is not None
    loss(x, weight.detach(), None, False).backward()
    assert wanted[-1] == [True, False]


def test_an_output_alone_sends_its_gradient() -> None:
    x, _ = leaves()
    toy(Inputs(x, None, None, 2.0, True))[1].sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_a_second_derivative_is_refused_with_what_to_use() -> None:
    x, weight = leaves()
    # A sum sends back a constant: the one case in which nothing but this would notice.
    for send in (torch.sum, lambda y: y.square().sum()):
        y = send(toy(Inputs(x, weight, None, 2.0, False))[0])
        with pytest.raises(RuntimeError, match=r"no second derivative.*without_kernels"):
            torch.autograd.grad(y, x, create_graph=True)


def test_an_option_before_a_tensor_is_refused() -> None:
    class Mixed(NamedTuple):
        factor: float
        x: Tensor

    with pytest.raises(TypeError, match="tensors must come first in Mixed"):
        custom_op("vort::never", Mixed, lambda i: (i.x,), _backward, lambda i: (i.x,), gradients=())


def product(x: Tensor) -> Tensor:
    with without_autocast(x):
        return x @ x


@pytest.mark.parametrize("kind", ["called", "compiled", "exported"])
def test_autocast_lowers_nothing_within_even_of_a_graph_made_without_it(kind: str) -> None:
    x, function = torch.rand(4, 4), product
    if kind == "compiled":
        function = torch.compile(product, fullgraph=True, backend="aot_eager")
    if kind == "exported":

        class Product(torch.nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return product(x)

        function = torch.export.export(Product(), (x,)).module()
    wanted = function(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(function(x), wanted)
        assert (x @ x).dtype == torch.bfloat16


def test_what_has_no_numbers_knows_no_autocast() -> None:
    x = torch.zeros(2, 2, device="meta")
    assert product(x).is_meta
    assert traced(x)
    with FakeTensorMode():
        assert product(torch.zeros(2, 2)).shape == (2, 2)


def test_an_op_of_tensors_without_numbers_has_shapes_and_gradients() -> None:
    x, weight = (leaf.detach().to("meta").requires_grad_() for leaf in leaves())
    found = torch.autograd.grad(loss(x, weight, None, True), (x, weight))
    assert [y.shape for y in found] == [x.shape, weight.shape]
