"""Parts that somebody has put in the place of ours, or hooked, are called; nothing goes past them.

Whether kernels would take a product is what sets the paths of a GPU apart: here they are told that
they would, and the ops below do what they do on a CPU.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.cases import model_of, tokens
from vort.layers import VortAttention
from vort.layers.parts import VortMLP
from vort.models import VortForCausalLM, modeling_vort
from vort.models import block as models_block
from vort.models.block import VortBlock
from vort.models.decoding import fingerprint, is_steady

PROMPT = tokens(1, 9)


@pytest.fixture(params=["cpu", "as on a gpu"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "cpu":
        for module in (models_block, modeling_vort):
            monkeypatch.setattr(module, "is_plain", lambda *_, **__: True)


class Around(nn.Module):
    """Calls what it holds, and counts."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.inner(*args, **kwargs)


PARTS = ("mlp", "self_attn", "")


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("name", PARTS)
@torch.no_grad()
def test_a_part_that_is_wrapped_is_called(name: str) -> None:
    model = model_of()
    expected = model(PROMPT).logits
    written = model.generate(PROMPT, max_new_tokens=3, do_sample=False, eos_token_id=None)
    layers = model.model.layers
    around = Around(getattr(layers[1], name) if name else layers[1])
    if name:
        setattr(layers[1], name, around)
    else:
        layers[1] = around
    torch.testing.assert_close(model(PROMPT).logits, expected)
    assert around.calls == 1
    again = model.generate(PROMPT, max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert torch.equal(again, written)
    assert around.calls == 4
    assert [type(memory) for memory in model.model.memories] == [type(model.model.memories[0])] * 2


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("kind", [VortBlock, VortAttention, VortMLP])
@torch.no_grad()
def test_a_class_of_ones_own_is_called(kind: type) -> None:
    calls: list[int] = []

    class Own(kind):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return super().forward(*args, **kwargs)

    model = model_of()
    expected = model(PROMPT).logits
    next(part for part in model.modules() if type(part) is kind).__class__ = Own
    torch.testing.assert_close(model(PROMPT).logits, expected)
    assert len(calls) == 1
    cache = model(PROMPT, use_cache=True).past_key_values
    for token in (3, 4):
        model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
    assert len(calls) == 4


@pytest.mark.parametrize("name", PARTS)
def test_a_step_with_a_wrapped_part_is_not_recorded(name: str) -> None:
    model = model_of()
    assert is_steady(model)
    before, layers = fingerprint(model), model.model.layers
    if name:
        setattr(layers[1], name, Around(getattr(layers[1], name)))
    else:
        layers[1] = Around(layers[1])
    assert not is_steady(model)
    assert fingerprint(model) != before


@pytest.mark.usefixtures("path")
def test_a_loss_of_ones_own_is_the_loss() -> None:
    model = model_of().train()
    model.loss_function = lambda **given: given["logits"].sum() * 0 + 42
    assert model(PROMPT, labels=PROMPT).loss.item() == 42


@torch.no_grad()
def steps_of(model: VortForCausalLM, ids: Tensor) -> Tensor:
    cache = model.new_cache()
    pieces = ids.split([3, *[1] * (ids.shape[1] - 3)], 1)
    return torch.cat(
        [model(piece, past_key_values=cache, use_cache=True).logits for piece in pieces], 1
    )


def test_hooks_of_all_modules_are_hooks() -> None:
    model = model_of()

    def double(module: nn.Module, _: Any, output: Any) -> Any:
        return output * 2 if type(module) is nn.Linear else None

    handle = nn.modules.module.register_module_forward_hook(double)
    try:
        torch.testing.assert_close(steps_of(model, PROMPT), model(PROMPT).logits)
    finally:
        handle.remove()


def test_layers_in_another_order_keep_their_states() -> None:
    model = model_of()
    model.model.layers = nn.ModuleList(reversed(model.model.layers))
    torch.testing.assert_close(steps_of(model, PROMPT), model(PROMPT).logits)


def test_a_block_without_a_memory_is_named() -> None:
    model = model_of()
    model.model.layers[0] = nn.Identity()
    with pytest.raises(TypeError, match="a block must hold a Memory, got Identity without one"):
        model.new_cache()
