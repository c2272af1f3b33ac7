"""Claims about the kernels, for Triton's interpreter; see `tests.ops.interpreter`."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

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

    x, weight = torch.randn(5, 12, requires_grad=True), torch.randn(7, 12, requires_grad=True)
    inputs = triton.LossInputs(x, weight, torch.tensor([0, 6, -100, 2, 3]), -100, True)
    torch.library.opcheck(torch.ops.vort.linear_cross_entropy.default, tuple(inputs))


def a_loss_without_gradient_is_that_with_one() -> None:
    from vort.ops.linear import triton

    x, targets = torch.randn(9, 12), torch.tensor([0, 32, -100, 2, 3, 8, -100, 31, 7])
    for size in (33, 40):
        weight = torch.randn(size, 12, requires_grad=True)
        loss = triton.cross_entropy_fused(x, weight, targets, -100)
        with torch.no_grad():
            assert torch.equal(triton.cross_entropy_fused(x, weight, targets, -100), loss)
        ignored = triton.cross_entropy_fused(x, weight, torch.full((9,), -100), -100)
        (grad,) = torch.autograd.grad(ignored, weight)
        assert ignored == 0
        assert not grad.any()


def a_target_that_is_none_changes_no_other_row() -> None:
    """Nobody looks at targets on a GPU."""
    from vort.ops.linear import triton

    x, weight = torch.randn(3, 12, requires_grad=True), torch.randn(40, 12)
    found = []
    for wrong in (40, 5):
        loss = triton.cross_entropy_fused(x, weight, torch.tensor([4, wrong, 6]), -100)
        found.append(torch.autograd.grad(loss, x)[0][[0, 2]])
    assert torch.equal(*found)


def weights_are_joined_by_one_kernel_where_it_can() -> None:
    from vort.ops.linear import triton

    wide = torch.randn(37, 48)
    joined = [
        [wide[:, :32], torch.randn(5, 32), torch.randn(300, 32)],
        [wide[:, 5:38], torch.randn(1, 33)],
        [torch.randn(3 + i, 20) for i in range(8)],
        [torch.randn(2, 8192)] * 2,
    ]
    left = [
        [torch.randn(2, 8193)] * 2,
        [torch.randn(3, 20)] * 9,
        [torch.randn(3, 20), torch.randn(3, 20).double()],
        [torch.randn(20, 3).T, torch.randn(4, 20)],
        [torch.randn(3, 20)],
    ]
    for cases, calls in ((joined, 1), (left, 0)):
        for weights in cases:
            with mock.patch.object(triton, "launch", wraps=triton.launch) as launched:
                found = triton._joined(weights, torch.float32)
            assert torch.equal(found, torch.cat(weights).float())
            assert launched.call_count == calls


def joined_weights_are_joined_once() -> None:
    """The backward finds what the forward has joined, where gradients come together."""
    from vort.ops.linear import triton

    with mock.patch.object(triton, "_joined", wraps=triton._joined) as joined:
        _block(True, {"num_scales": 6, "output_gate": True, "use_entity": True}, 33)
    assert joined.call_count == 2  # of attention, and of the MLP


def a_layer_of_kernels_equals_one_without() -> None:
    """Output, gradients, states and steps in place of a whole layer, through every fused part."""
    outputs, gradients, steps = zip(*(_layer(fused) for fused in (True, False)), strict=True)
    for got, wanted in ((outputs[0], outputs[1]), (steps[0], steps[1])):
        assert (got - wanted).norm() <= 1e-5 * wanted.norm()
    assert gradients[0].keys() == gradients[1].keys()
    for name, got in gradients[0].items():
        wanted = gradients[1][name]
        assert (got - wanted).norm() <= 2e-5 * wanted.norm() + 1e-7, name


def a_block_of_kernels_equals_one_without() -> None:
    """Hidden states and gradients of a block with its norms, whatever its router reads."""
    for options in ({"use_entropy": True}, {"use_entropy": False, "use_entity": True}):
        (got, gradients), (wanted, truth) = (_block(fused, options) for fused in (True, False))
        assert (got - wanted).norm() <= 1e-5 * wanted.norm()
        assert gradients.keys() == truth.keys()
        for name, gradient in gradients.items():
            error = (gradient - truth[name]).norm()
            assert error <= 2e-5 * truth[name].norm() + 1e-7, (name, options)


def gradients_of_many_rows_come_together() -> None:
    """Those of heads, gate and routing meet in one product, and are what they are apart."""
    from vort.ops.gpu.together import Together

    found, original = [], Together.whole

    def whole(self: Together, grads: Sequence[Tensor | None]) -> Tensor | None:
        found.append(original(self, grads))
        return found[-1]

    with mock.patch.object(Together, "whole", whole):
        options = {"num_scales": 6, "output_gate": True, "use_entity": True}
        (got, gradients), (wanted, truth) = (_block(f, options, 33) for f in (True, False))
    assert [None if x is None else x.shape for x in found] == [(66, 16 * 4 + 16)]
    assert (got - wanted).norm() <= 1e-5 * wanted.norm()
    for name, gradient in gradients.items():
        assert (gradient - truth[name]).norm() <= 2e-5 * truth[name].norm() + 1e-7, name


def a_model_of_kernels_equals_one_without() -> None:
    """The loss and its gradients; hidden states asked for are whole ones."""
    (loss, states, gradients), (wanted, true_states, truth) = (_model(f) for f in (True, False))
    assert (loss - wanted).abs() <= 1e-5 * wanted
    for got, true in zip(states, true_states, strict=True):
        assert (got - true).norm() <= 1e-5 * true.norm()
    for name, gradient in gradients.items():
        assert (gradient - truth[name]).norm() <= 3e-5 * truth[name].norm() + 1e-7, name


def rows_picked_after_the_memory_equal_those_among_all() -> None:
    """Hidden states asked for and all gradients, through the parts that a GPU takes."""
    from vort.models import VortConfig, VortModel
    from vort.ops.asked import Asked

    torch.manual_seed(0)
    config = VortConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=1, sliding_window=3,
        horizon=100, num_scales=2, intermediate_size=24, vocab_size=11, output_gate=True,
    )  # fmt: skip
    model = VortModel(config).train()
    ids, asked = torch.randint(11, (1, 34)), torch.tensor([33, 3, 5])
    found = []
    with kernels_everywhere(True), mock.patch.object(Asked, "late", True):
        for given in ({"asked": asked}, {}):
            hidden = model(ids, use_cache=False, **given)[0]
            hidden = hidden if given else hidden.flatten(0, 1)[asked]
            (hidden * torch.linspace(-1, 1, 16)).sin().sum().backward()
            found.append((hidden, {n: p.grad for n, p in model.named_parameters()}))
            model.zero_grad()
    (got, gradients), (wanted, truth) = found
    assert (got - wanted).norm() <= 1e-5 * wanted.norm()
    for name, gradient in gradients.items():
        assert (gradient - truth[name]).norm() <= 3e-5 * truth[name].norm() + 1e-7, name


def _model(fused: bool) -> tuple[Tensor, tuple[Tensor, ...], dict[str, Tensor]]:
    from vort.models import VortConfig, VortForCausalLM

    with kernels_everywhere(fused):
        torch.manual_seed(0)
        config = VortConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, sliding_window=3,
            horizon=100, num_scales=2, intermediate_size=24, vocab_size=11,
        )  # fmt: skip
        model = VortForCausalLM(config).train()
        ids = torch.randint(11, (1, 6))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        with torch.no_grad():
            states = model(input_ids=ids, output_hidden_states=True).hidden_states
        return loss.detach(), states, {n: p.grad for n, p in model.named_parameters()}


def _block(
    fused: bool, options: dict[str, Any], length: int = 7
) -> tuple[Tensor, dict[str, Tensor]]:
    from vort.models import VortConfig
    from vort.models.block import VortBlock

    with kernels_everywhere(fused):
        torch.manual_seed(0)
        config = VortConfig(
            hidden_size=16, num_attention_heads=2, sliding_window=3, horizon=100,
            intermediate_size=24, **{"num_scales": 3} | options,
        )  # fmt: skip
        block = VortBlock(config, 0)
        x = torch.randn(2, length, 16, requires_grad=True)
        y, _ = block(x, entity_mask=torch.eye(length)[:2])
        (y * torch.linspace(-1, 1, 16)).sum().backward()
        return y.detach(), {n: p.grad for n, p in block.named_parameters()} | {"x": x.grad}


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
