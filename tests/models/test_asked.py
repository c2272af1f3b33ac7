"""Hidden states of some positions alone: what they are among all, and so are the gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.memories.cases import NAMES
from tests.models.cases import model_of, tokens
from vort.layers import VortAttention
from vort.memories import retention_memory
from vort.memories.interface import MemoryInputs, MemoryOutput
from vort.memories.retention_memory import without_queries
from vort.models import VortConfig, VortForCausalLM
from vort.models.block import VortBlock
from vort.models.training import RecordedStep
from vort.ops.asked import Asked

BATCH, LENGTH = 2, 150
# As the tables of recall have them, and all that a block may have besides.
RECALL = {"num_hidden_layers": 1, "num_attention_heads": 1, "sliding_window": 0, "conv_size": 0}


def places(count: int = 25) -> Tensor:
    return torch.randperm(BATCH * LENGTH, generator=torch.Generator().manual_seed(0))[:count]


def answers(model: Any, index: Tensor, whole: bool, **options: Any) -> tuple[Tensor, list[Tensor]]:
    """Hidden states at places, by way of all of them or not, and gradients of all parameters."""
    model.zero_grad()
    ids = tokens(BATCH, LENGTH)
    if whole:
        found = model.model(ids, use_cache=False, **options)[0].flatten(0, 1)[index]
    else:
        found = model.model(ids, use_cache=False, asked=index, **options)[0]
    (found * torch.linspace(-1, 1, found.shape[-1])).sin().sum().backward()
    return found, [x.grad.clone() for x in model.parameters() if x.grad is not None]


def spied(monkeypatch: pytest.MonkeyPatch, late: bool = False) -> list[int]:
    """How many rows the last block was asked for, to be picked late or not, call by call."""
    seen: list[int] = []
    called = VortBlock.of_asked

    def spy(self: VortBlock, *given: Any) -> Any:
        seen.extend(len(x.places) for x in given if isinstance(x, Asked) and x.late == late)
        return called(self, *given)

    monkeypatch.setattr(VortBlock, "of_asked", spy)
    return seen


def picked_late(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As on a GPU: rows are picked after the memory. How many, call by call."""
    monkeypatch.setattr(Asked, "late", True)
    return spied(monkeypatch, late=True)


@pytest.mark.parametrize("kind", [*NAMES, "paper"])
def test_some_positions_are_those_among_all(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, index, seen = model_of(kind).train(), places(), spied(monkeypatch)
    found, expected = (answers(model, index, whole) for whole in (False, True))
    assert seen == [25]
    assert found[0].shape == (25, 32)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    for one, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("torch_road")
@pytest.mark.parametrize("kind", ["vort", "exponential", "mixture", "uniform_power_law", "softmax"])
@pytest.mark.parametrize("more", [{}, {"output_gate": True, "sliding_window": 6}])
def test_a_table_of_recall_trains_to_the_same_bits(kind: str, more: dict[str, Any]) -> None:
    model, index = model_of(kind, **{**RECALL, **more}).train(), places()
    found, expected = (answers(model, index, whole) for whole in (False, True))
    assert torch.equal(found[0], expected[0])
    assert all(map(torch.equal, found[1], expected[1]))


@pytest.mark.parametrize("kind", [*NAMES, "paper"])
@pytest.mark.parametrize("more", [{}, {"output_gate": False, **RECALL}])
def test_rows_picked_after_the_memory_are_those_among_all(
    kind: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = picked_late(monkeypatch)
    model = model_of(kind, **more).train()
    found, expected = (answers(model, places(), whole) for whole in (False, True))
    assert seen == [25]
    assert found[0].shape == (25, 32)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    for one, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))
    with torch.no_grad():
        again = model.eval().model(tokens(BATCH, LENGTH), use_cache=False, asked=places())[0]
    torch.testing.assert_close(again, expected[0], rtol=1e-5, atol=1e-5)


def test_retention_hears_which_rows_are_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    picked_late(monkeypatch)
    heard: list[Any] = []
    retention = retention_memory.retention

    def spy(*given: Any, **options: Any) -> Any:
        heard.append(options["asked"])
        return retention(*given, **options)

    monkeypatch.setattr(retention_memory, "retention", spy)
    index = places()
    answers(model_of("vort").train(), index, False)
    assert [x is None for x in heard] == [True, False]  # of the last of two layers alone
    assert heard[1] is index


def test_rows_picked_after_the_memory_know_of_entities(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = picked_late(monkeypatch)
    model = model_of(use_entity=True).train()
    entities = (torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 3 == 0).long()
    found, expected = (answers(model, places(), w, entity_mask=entities) for w in (False, True))
    assert seen == [25]
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    assert (found[0] - answers(model, places(), False)[0]).abs().max() > 1e-4


@pytest.mark.parametrize(
    "part", ["input_layernorm", "self_attn.g_proj", "self_attn.norm", "mlp.down_proj", "self_attn"]
)
def test_who_watches_a_part_sees_all_positions_where_rows_are_picked(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = picked_late(monkeypatch)
    model = model_of(output_gate=True).train()
    shapes: list[torch.Size] = []
    watch: Any = lambda module, given, output: shapes.append(given[0].shape)  # noqa: E731
    model.model.layers[-1].get_submodule(part).register_forward_hook(watch)
    answers(model, places(), False)
    assert seen == []
    assert [shape[:2] for shape in shapes] == [(BATCH, LENGTH)]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("why", ["mask", "hook", "bias", "states", "checkpoints"])
def test_where_a_block_must_see_all_positions_it_does(
    why: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(attention_bias=why == "bias").train()
    options: dict[str, Any] = {"output_hidden_states": True} if why == "states" else {}
    if why == "mask":
        options["attention_mask"] = torch.ones(BATCH, LENGTH).index_fill_(1, torch.arange(9), 0)
    shapes: list[torch.Size] = []
    if why == "hook":
        watch: Any = lambda module, given, output: shapes.append(output.shape)  # noqa: E731
        model.model.layers[-1].mlp.register_forward_hook(watch)
    if why == "checkpoints":
        model.gradient_checkpointing_enable()
    seen = picked_late(monkeypatch) if late else spied(monkeypatch)
    found, expected = (answers(model, places(), whole, **options) for whole in (False, True))
    assert seen == []
    assert all(shape[:2] == (BATCH, LENGTH) for shape in shapes)
    assert len(shapes) == 2 * (why == "hook")
    torch.testing.assert_close(found[0], expected[0])


@pytest.mark.parametrize("late", [False, True])
def test_what_is_still_to_be_added_is(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Asked, "late", late)
    block: Any = model_of(output_gate=True).model.layers[-1]
    x, delta = torch.randn(2, BATCH, LENGTH, 32)
    asked = Asked(places(), BATCH, LENGTH)
    found, rest = block.of_asked(x, delta, asked, None)
    found = (found if rest is None else found + rest)[: len(asked.places)]
    expected = block(x, delta)[0].flatten(0, 1)[asked.places]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_memory_that_knows_nothing_of_it_answers_for_all() -> None:
    model = model_of("vort")
    memory: Any = model.model.layers[-1].self_attn.memory

    class Own(type(memory)):  # type: ignore[misc]
        def forward(self, inputs: Any, state: Any = None, *, output_state: bool = False) -> Any:
            return MemoryOutput(nn.functional.softplus(inputs.v))

    memory.__class__ = Own
    found, expected = (answers(model, places(), whole)[0] for whole in (False, True))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("own", [False, True])
def test_queries_of_others_are_made_only_where_a_routing_of_ones_own_may_look_at_them(
    own: bool,
) -> None:
    model = model_of("vort", **RECALL)
    memory: Any = model.model.layers[-1].self_attn.memory
    shapes: list[tuple[int, ...]] = []

    class Own(type(memory)):  # type: ignore[misc]
        def route(self, inputs: Any) -> Any:
            shapes.append(inputs.q.shape[:-1])
            return super().route(inputs)

    if not own:
        without_queries(Own.route)
    memory.__class__ = Own
    answers(model, places(), False)
    assert shapes == [(BATCH, LENGTH, 1) if own else (32, 1)]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (torch.tensor([3, 3]), "asked must name each place once"),
        (torch.tensor([3, 20]), r"asked must lie in \[0, 20\), got 3 to 20"),
        (torch.tensor([-1]), "asked must lie in"),
        (torch.tensor([1.0]), r"asked must be \[N\] places, int64, got \[1\] of torch.float32"),
        (torch.tensor([[1]]), r"asked must be \[N\] places"),
    ],
)
def test_what_are_no_places_is_refused(asked: Tensor, message: str) -> None:
    model = VortForCausalLM(VortConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    tokens = torch.zeros(2, 10, dtype=torch.long)
    with pytest.raises(ValueError, match=message):
        model.model(tokens, asked=asked)
    with pytest.raises(TypeError, match="asked is for the model without its head"):
        model(tokens, asked=asked)


def test_a_layer_is_asked_for_places_of_whole_sequences_alone() -> None:
    layer = VortAttention(hidden_size=16, num_attention_heads=2, sliding_window=0)
    x, asked = torch.randn(1, 40, 16), Asked(torch.tensor([3, 30]), 1, 40)
    bounds, mask = torch.tensor([0, 15, 40]), torch.ones(1, 40, dtype=torch.bool)
    for beside in ({"cu_seqlens": bounds}, {"attention_mask": mask}):
        with pytest.raises(
            ValueError, match="asked must be None beside a mask, states, cu_seqlens"
        ):
            layer.after_norm(None, x, **beside, asked=asked)
    q, k, v = torch.randn(3, 1, 40, 2, 8)
    inputs = MemoryInputs(x, q, k, v, cu_seqlens=bounds, asked=asked)
    with pytest.raises(ValueError, match="asked must be None beside states, padding, cu_seqlens"):
        layer.memory(inputs)


GPU_KINDS = ["vort", "mixture", "gla", "none"]


def loss_on_gpu(model: Any, batch: Any, whole: bool, half: bool) -> Tensor:
    """Of hidden states at `batch["places"]`, by way of all of them or not."""
    ids, index = batch["ids"], batch["places"]
    with torch.autocast("cuda", torch.bfloat16, enabled=half):
        if whole:
            found = model.model(ids, use_cache=False)[0].flatten(0, 1)[index]
        else:
            found = model.model(ids, use_cache=False, asked=index)[0]
    target = torch.linspace(-1, 1, found.shape[-1], device=found.device)
    loss: Tensor = (found.float() * target).sin().mean()
    return loss


def on_gpu(seed: int, length: int = 1000, count: int = 48) -> dict[str, Tensor]:
    order = torch.randperm(BATCH * length, generator=torch.Generator().manual_seed(seed))
    return {"ids": tokens(BATCH, length, seed).cuda(), "places": order[:count].cuda()}


def gradients_of(model: Any) -> dict[str, Tensor]:
    """All of them, and none are left."""
    found = {n: torch.zeros_like(x) if x.grad is None else x.grad.clone()
             for n, x in model.named_parameters()}  # fmt: skip
    model.zero_grad()
    return found


def check_on_gpu(model: Any, loss: Tensor, batch: dict[str, Tensor], half: bool) -> None:
    """The loss, and gradients that are there, against those by way of all positions."""
    tolerance, found = 3e-2 if half else 1e-3, gradients_of(model)
    expected = loss_on_gpu(model, batch, True, half)
    expected.backward()
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=tolerance, atol=tolerance)
    wanted = gradients_of(model)
    largest = max(float(x.norm()) for x in wanted.values())
    assert largest > 0
    for name, x in wanted.items():
        error = float((found[name] - x).norm()) / (float(x.norm()) + 0.01 * largest)
        assert error < tolerance, f"{name} is off by {error:.1e}"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", GPU_KINDS)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("more", [{}, {**RECALL, "num_attention_heads": 2}])
def test_a_gpu_picks_rows_after_the_memory(
    kind: str, half: bool, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = spied(monkeypatch, late=True)
    model = model_of(kind, hidden_size=128, **more).train().cuda()
    batch = on_gpu(0)
    loss = loss_on_gpu(model, batch, False, half)
    loss.backward()
    check_on_gpu(model, loss, batch, half)
    with torch.no_grad():
        again = loss_on_gpu(model.eval(), batch, False, half)
    torch.testing.assert_close(again, loss.detach(), rtol=1e-3, atol=1e-3)
    assert seen == [48, 48]


@pytest.mark.gpu
def test_a_place_that_is_asked_for_twice_on_a_gpu_counts_twice() -> None:
    model = model_of("vort", hidden_size=128, **RECALL).train().cuda()
    batch = on_gpu(0)
    batch["places"] = batch["places"].repeat_interleave(2)
    loss = loss_on_gpu(model, batch, False, False)
    loss.backward()
    check_on_gpu(model, loss, batch, False)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", GPU_KINDS)
def test_a_recorded_step_may_be_asked_for_other_places(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = spied(monkeypatch, late=True)
    model = model_of(kind, hidden_size=128, **RECALL).train().cuda()
    step = RecordedStep(model, lambda batch: loss_on_gpu(model, batch, False, True))
    for seed in range(7):
        batch = on_gpu(seed)
        check_on_gpu(model, step(batch), batch, True)
    assert step.recorded
    assert seen == [48] * 4  # three as usual and the recording: a replay calls nothing
