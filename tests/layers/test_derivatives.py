"""Second derivatives, and torch.func: what is written by hand gives way to PyTorch."""

import pytest
import torch
from torch.func import functional_call, grad, hessian, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.layers.cases import HIDDEN, layer_of
from vort.layers import LayerStates
from vort.ops import local_attention, retention, without_kernels
from vort.ops.local_attention.local import attend_locally


@pytest.mark.parametrize("kind", ["vort", "undecayed", "no_window", "gla", "softmax"])
@pytest.mark.parametrize("length", [3, 9])
def test_a_layer_can_be_differentiated_twice(kind: str, length: int) -> None:
    layer = layer_of(kind).double()
    x = torch.randn(1, length, HIDDEN, dtype=torch.float64, requires_grad=True)
    # PyTorch's own fused attention, the whole of "softmax", has no second derivative.
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(lambda x: layer(x)[0], x, fast_mode=True)


def test_retention_has_second_derivatives_to_all_it_is_given() -> None:
    def new(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, dtype=torch.float64, requires_grad=True)

    q, v, write, read = new(1, 6, 1, 2), new(1, 6, 1, 2), new(1, 6, 1, 2), new(1, 6, 1, 2)
    decay = (-torch.rand(2, dtype=torch.float64)).requires_grad_()

    def call(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, v, write, read, decay = given
        # q twice, as query and key: the same tensor must not be counted double.
        output, state = retention(
            q, q, v, write, decay, read=read, output_final_state=True, backend="chunk"
        )
        return output, state.G, state.b

    assert torch.autograd.gradgradcheck(call, (q, v, write, read, decay))


@pytest.mark.parametrize("case", ["plain", "padded", "packed", "continued"])
def test_local_attention_has_second_derivatives(case: str) -> None:
    q, k, v = (torch.randn(1, 7, n, 2, dtype=torch.float64) for n in (2, 1, 1))
    tensors = [x.requires_grad_() for x in (q, k, v)]
    mask = torch.tensor([[True] * 5 + [False] * 2]) if case == "padded" else None
    bounds = torch.tensor([0, 3, 7]) if case == "packed" else None

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if case == "continued":
            first = [x[:, :3] for x in (q, k, v)]
            _, _, state = attend_locally(*first, 3, output_state=True)
            rest = [x[:, 3:] for x in (q, k, v)]
            return attend_locally(*rest, 3, state=state, return_entropy=True)[:2]
        return local_attention(
            q, k, v, 3, padding_mask=mask, cu_seqlens=bounds, return_entropy=True
        )

    assert torch.autograd.gradcheck(call, tensors)
    assert torch.autograd.gradgradcheck(call, tensors)


@pytest.mark.parametrize("length", [3, 20])
def test_gradients_of_single_examples_are_those_of_each_alone(length: int) -> None:
    layer, x = layer_of("vort"), torch.randn(3, 1, length, HIDDEN)
    weights = dict(layer.named_parameters())

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(layer, weights, (x,))[0].square().sum()

    together = vmap(grad(loss), (None, 0))(weights, x)
    for row in range(3):
        layer.zero_grad()
        layer(x[row])[0].square().sum().backward()
        for name, weight in layer.named_parameters():
            torch.testing.assert_close(together[name][row], weight.grad, atol=1e-3, rtol=1e-3)


def test_forward_mode_and_hessians_agree_with_backward_mode() -> None:
    layer = layer_of("vort").double()
    x, along = torch.randn(2, 1, 6, HIDDEN, dtype=torch.float64)

    def scalar(x: torch.Tensor) -> torch.Tensor:
        return layer(x[None])[0].square().sum()

    slope = jvp(scalar, (x[0],), (along[0],))[1]
    torch.testing.assert_close(slope, (grad(scalar)(x[0]) * along[0]).sum())
    curve = (hessian(scalar)(x[0]).flatten(2).flatten(0, 1) @ along[0].flatten()).view(6, HIDDEN)
    along_grad = jvp(grad(scalar), (x[0],), (along[0],))[1]
    torch.testing.assert_close(curve, along_grad)


@torch.no_grad()
def test_rows_can_be_mapped_while_decoding() -> None:
    layer, x = layer_of("vort").eval(), torch.randn(4, 1, 5, HIDDEN)

    def last(x: torch.Tensor) -> torch.Tensor:
        states = LayerStates()
        layer(x[:, :4], past_key_values=states, use_cache=True)
        return layer(x[:, 4:], past_key_values=states, use_cache=True)[0]

    expected = torch.stack([last(row) for row in x])
    torch.testing.assert_close(vmap(last)(x), expected, atol=1e-5, rtol=1e-4)


def test_kernels_can_be_switched_off_and_on() -> None:
    layer, x = layer_of("vort"), torch.randn(1, 9, HIDDEN)
    with without_kernels(), without_kernels():
        inside = layer(x)[0]
    torch.testing.assert_close(inside, layer(x)[0])


@pytest.mark.gpu
def test_kernels_name_what_has_a_second_derivative() -> None:
    layer = layer_of("vort").cuda()
    x = torch.randn(1, 90, HIDDEN, device="cuda", requires_grad=True)
    with pytest.raises(RuntimeError, match="without_kernels"):
        torch.autograd.grad(layer(x)[0].sum(), x, create_graph=True)
    with without_kernels():
        (first,) = torch.autograd.grad(layer(x)[0].sum(), x, create_graph=True)
        first.square().sum().backward()
    assert x.grad.isfinite().all()
    assert grad(lambda x: layer(x)[0].sum())(x.detach()).isfinite().all()
