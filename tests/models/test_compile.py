"""One program for many lengths and many tokens: torch.compile, torch.export, pytrees."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from transformers import CompileConfig

from tests.models.cases import model_of, tokens

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
LENGTHS = (70, 81, 100, 130, 131, 200, 77, 90, 164, 190)


class Counting:
    """A backend that counts the graphs it is given."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward

    def __deepcopy__(self, memo: Any) -> "Counting":
        return self  # whoever copies a configuration means the same counter


# Without a mask it is the graph that training has, which the next test asks for.
@pytest.mark.parametrize("masked", [pytest.param(False, marks=pytest.mark.slow), True])
@torch.no_grad()
def test_one_graph_serves_all_lengths(masked: bool) -> None:
    model, backend = model_of(num_hidden_layers=1), Counting()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for length in LENGTHS:
        ids = tokens(2, length)
        given = {"attention_mask": torch.ones_like(ids)} if masked else {}
        found = compiled(ids, use_cache=False, **given).logits
        torch.testing.assert_close(found, model(ids).logits, **CLOSE)
    # The first length is taken for the only one, the second for any.
    assert backend.graphs <= 2


def test_one_graph_serves_all_lengths_in_training() -> None:
    model, backend = model_of(num_hidden_layers=1).train(), Counting()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for length in LENGTHS:
        ids = tokens(2, length)
        compiled(ids, labels=ids).loss.backward()
    assert backend.graphs <= 2


@pytest.mark.parametrize("dynamic", [None, False])
@torch.no_grad()
def test_one_graph_serves_all_tokens_of_a_static_cache(dynamic: bool | None) -> None:
    model, backend, ids = model_of(num_hidden_layers=1), Counting(), tokens(2, 30)
    cache = model.new_cache(static=True)
    model(ids[:, :10], past_key_values=cache, use_cache=True)
    step = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    for position in range(10, 30):
        piece = ids[:, position : position + 1]
        found = step(piece, past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(found, model(ids).logits[:, -1:], **CLOSE)
    assert backend.graphs == 1
    assert cache.get_seq_length() == 30
    assert cache.copy().get_seq_length() == 30
    cache.reset()
    assert cache.get_seq_length() == 0


@pytest.mark.slow
@pytest.mark.parametrize(("memory", "graphs"), [("vort", 1), ("paper", 1), ("softmax", 0)])
@torch.no_grad()
def test_generation_compiles_a_step_once(memory: str, graphs: int) -> None:
    model, backend, prompt = model_of(memory), Counting(), tokens(2, 12)
    config = CompileConfig(backend=backend, mode=None, fullgraph=True)
    config._compile_all_devices = True
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = model.generate(prompt, **options)
    found = model.generate(prompt, cache_implementation="static", compile_config=config, **options)
    assert torch.equal(found, expected)
    assert backend.graphs == graphs


@torch.no_grad()
def test_an_exported_model_takes_any_batch_and_length() -> None:
    model = model_of(num_hidden_layers=1)
    sizes = {0: torch.export.Dim("batch", min=2, max=9), 1: torch.export.Dim("time", min=2, max=99)}
    given = {"input_ids": tokens(3, 40), "use_cache": False}
    shapes = {"input_ids": sizes, "use_cache": None}
    # A model of which nothing is kept from an earlier call, and which is not the worse for it.
    exported = torch.export.export(model, (), kwargs=given, dynamic_shapes=shapes).module()
    for batch, length in ((2, 2), (5, 17), (3, 65), (4, 99)):
        ids = tokens(batch, length)
        expected = model(ids, use_cache=False).logits
        assert type(expected) is torch.Tensor
        found = exported(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(found, expected, **CLOSE)


@torch.no_grad()
def test_a_cache_is_a_pytree_and_goes_through_an_export() -> None:
    model, ids = model_of(num_hidden_layers=1), tokens(2, 12)
    cache = model.new_cache()
    model(ids[:, :11], past_key_values=cache, use_cache=True)
    leaves, shape = pytree.tree_flatten(cache)
    again = pytree.tree_unflatten(leaves, shape)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    assert (again.get_seq_length(), again.nbytes) == (11, cache.nbytes)

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, token: torch.Tensor, past: Any) -> Any:
            found = self.model(token, past_key_values=past, use_cache=True)
            return found.logits, found.past_key_values

    step = torch.export.export(Step(), (ids[:, 11:], cache.copy())).module()
    logits, after = step(ids[:, 11:], cache.copy())
    torch.testing.assert_close(logits, model(ids).logits[:, -1:], **CLOSE)
    assert after.get_seq_length() == 12


@pytest.mark.parametrize("name", ["position_ids", "seq_idx"])
def test_an_export_of_rows_that_numbers_pack_is_refused_in_words(name: str) -> None:
    given = {"input_ids": tokens(1, 9), name: torch.arange(9)[None], "use_cache": False}
    with pytest.raises(ValueError, match="or give cu_seqlens"):
        torch.export.export(model_of(), (), kwargs=given, strict=False)


@torch.no_grad()
def test_an_exported_model_takes_other_bounds() -> None:
    model, ids, bounds = model_of(), tokens(1, 9), torch.tensor([0, 4, 9])
    given = {"input_ids": ids, "cu_seqlens": bounds, "use_cache": False}
    exported = torch.export.export(model, (), kwargs=given).module()
    for cut in (4, 7):
        given["cu_seqlens"] = torch.tensor([0, cut, 9])
        torch.testing.assert_close(exported(**given).logits, model(**given).logits, **CLOSE)
