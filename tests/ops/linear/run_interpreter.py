"""Claims about the kernels, for Triton's interpreter; see `tests.ops.interpreter`."""

import torch
from torch import Tensor

from tests.ops.interpreter import check_claim, kernels_everywhere
from tests.ops.linear.cases import CHECKS

BOUND = 2e-6


def every_output_and_gradient_equals_exact() -> None:
    for seed, (name, check) in enumerate(CHECKS.items()):
        errors = check(torch.float32, "cpu", seed)
        assert all(error <= BOUND for error in errors.values()), (name, errors)


def obeys_torch_library() -> None:
    from vort.ops.linear import triton

    both, weight = torch.randn(5, 12, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    inputs = triton.GatedInputs(both, weight)
    torch.library.opcheck(torch.ops.vort.gated_linear.default, tuple(inputs))


def a_layer_of_kernels_equals_one_without() -> None:
    """Output, gradients, states and steps in place of a whole layer, through every fused part."""
    outputs, gradients, steps = zip(*(_layer(fused) for fused in (True, False)), strict=True)
    for got, wanted in ((outputs[0], outputs[1]), (steps[0], steps[1])):
        assert (got - wanted).norm() <= 1e-5 * wanted.norm()
    assert gradients[0].keys() == gradients[1].keys()
    for name, got in gradients[0].items():
        wanted = gradients[1][name]
        assert (got - wanted).norm() <= 2e-5 * wanted.norm() + 1e-7, name


def _layer(fused: bool) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """One layer's output, gradients, and its outputs token by token after a prompt."""
    from vort.layers import LayerStates, VortAttention

    with kernels_everywhere(fused):
        torch.manual_seed(0)
        layer = VortAttention(
            hidden_size=32, num_attention_heads=2, sliding_window=5, horizon=100, num_scales=3,
            output_gate=True,
        )  # fmt: skip
        x = torch.randn(2, 13, 32, requires_grad=True)
        y, _ = layer(x)
        (y * torch.linspace(-1, 1, 32)).sum().backward()
        gradients = {n: p.grad for n, p in layer.named_parameters()} | {"x": x.grad}
        states, parts = LayerStates(static=True), []
        with torch.no_grad():
            layer(x[:, :9], past_key_values=states, use_cache=True)
            states.in_place = True
            places = {n: t.data_ptr() for n, t in states.states[0].items()}
            for t in range(9, 13):
                part, _ = layer(x[:, t : t + 1], past_key_values=states, use_cache=True)
                parts.append(part)
        assert places == {n: t.data_ptr() for n, t in states.states[0].items()}
        return y.detach(), gradients, torch.cat(parts, 1)


if __name__ == "__main__":
    check_claim()
