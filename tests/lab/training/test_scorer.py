"""Logits where something is asked, from models of any make."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from tests.lab.training.tiny import TASK, tiny
from vort.lab.tasks import LabelCopy
from vort.lab.training import Scorer
from vort.lab.training.data import compact

BATCH = compact(TASK.batch("train", range(3)))


def expected(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found = model(BATCH["input_ids"])
        logits = found if isinstance(found, Tensor) else found.logits
        return logits.flatten(0, 1)[BATCH["positions"]][:, : TASK.num_classes]


def vort_model(**settings: object) -> nn.Module:
    models = pytest.importorskip("vort.models")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = models.VortConfig(vocab_size=TASK.vocab_size, **sizes, **settings)
    return models.VortForCausalLM(config).eval()


def test_logits_and_loss_are_those_at_labelled_positions() -> None:
    model = tiny().eval()
    scores = Scorer(model, TASK.num_classes)(BATCH)
    assert torch.equal(scores["logits"], expected(model))
    loss = nn.functional.cross_entropy(expected(model), BATCH["targets"])
    assert torch.allclose(scores["loss"], loss)


def test_the_head_of_a_hugging_face_model_sees_labelled_positions_alone() -> None:
    model = vort_model()
    scorer = Scorer(model, TASK.num_classes)
    seen = []
    hook = model.get_output_embeddings().register_forward_hook(
        lambda module, inputs, output: seen.append(inputs[0].shape)
    )
    logits = scorer(BATCH)["logits"]
    hook.remove()
    assert seen == [(9, 16)]
    assert torch.allclose(logits, expected(model), atol=1e-6)


def test_a_model_that_can_be_asked_for_few_positions_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = vort_model()
    scorer, asked = Scorer(model, TASK.num_classes), []
    forward = type(model.base_model).forward

    def spy(self: nn.Module, *args: object, **given: object) -> object:
        asked.append(given.get("asked"))
        return forward(self, *args, **given)

    monkeypatch.setattr(type(model.base_model), "forward", spy)
    logits = scorer(BATCH)["logits"]
    assert asked[0] is BATCH["positions"]
    assert torch.allclose(logits, expected(model), atol=1e-6)


def test_where_everything_is_asked_nothing_is_picked_and_gradients_are_the_same() -> None:
    model = vort_model()
    scorer = Scorer(model, TASK.num_classes)
    tokens = BATCH["input_ids"]
    positions = torch.arange(tokens.numel())
    batch = {"input_ids": tokens, "positions": positions, "targets": positions % 4}
    found = scorer(batch)
    found["loss"].backward()
    own = [x.grad.clone() for x in model.parameters() if x.grad is not None]
    model.zero_grad()
    picked = model.base_model(input_ids=tokens)[0].flatten(0, 1)[positions]
    logits = model.get_output_embeddings()(picked)[:, : TASK.num_classes]
    nn.functional.cross_entropy(logits, batch["targets"]).backward()
    assert torch.equal(found["logits"], logits)
    assert all(map(torch.equal, own, (x.grad for x in model.parameters() if x.grad is not None)))
    assert "IndexBackward" not in str(_names(found["loss"].grad_fn))


def _names(node: object) -> set[str]:
    nodes, seen = [node], set()
    while nodes:
        each = nodes.pop()
        if each is not None and each not in seen:
            seen.add(each)
            nodes += [after for after, _ in each.next_functions]  # type: ignore[attr-defined]
    return {type(each).__name__ for each in seen}


def test_a_model_that_changes_its_logits_is_not_taken_apart() -> None:
    model = vort_model()
    plain = model.forward

    def capped(*args: object, **kwargs: object) -> object:
        found = plain(*args, **kwargs)
        found.logits = 5 * torch.tanh(found.logits / 5)
        return found

    model.forward = capped
    scorer = Scorer(model, TASK.num_classes)
    assert not scorer.has_parts
    assert torch.allclose(scorer(BATCH)["logits"], expected(model), atol=1e-6)


@pytest.mark.parametrize(("kind", "apart"), [("Llama", True), ("GPT2", True), ("Gemma2", False)])
def test_models_of_the_library_are_taken_apart_where_that_is_right(kind: str, apart: bool) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {"intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 8}
    if kind == "GPT2":
        sizes, more = {"n_embd": 16, "n_layer": 1, "n_head": 2}, {}
    tokens = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    settings = {"vocab_size": TASK.vocab_size, **sizes, **more, **tokens}
    config = getattr(transformers, f"{kind}Config")(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    scorer = Scorer(model.eval(), TASK.num_classes)
    assert scorer.has_parts == apart
    assert torch.allclose(scorer(BATCH)["logits"], expected(model), atol=1e-6)


def test_no_state_is_kept_that_nobody_goes_on_from() -> None:
    model = vort_model()
    seen = []
    model.model.register_forward_hook(
        lambda module, inputs, output: seen.append(output.past_key_values)
    )
    Scorer(model, TASK.num_classes)(BATCH)
    assert seen
    assert all(cache is None for cache in seen)


@pytest.mark.parametrize(
    "wrap", [lambda x: {"logits": x}, lambda x: (x,), lambda x: SimpleNamespace(logits=x)]
)
def test_outputs_of_any_make_are_understood(wrap: object) -> None:
    model = tiny().eval()
    wanted, plain = expected(model), model.forward
    model.forward = lambda input_ids: wrap(plain(input_ids))
    assert torch.equal(Scorer(model, TASK.num_classes)(BATCH)["logits"], wanted)


def test_a_model_may_give_a_loss_of_its_own_from_unshifted_labels() -> None:
    class Lossy(nn.Module):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            assert torch.equal(labels, TASK.batch("train", range(3))["labels"])
            return input_ids.double().mean()

    scorer = Scorer(Lossy(), TASK.num_classes)
    assert scorer(BATCH)["loss"] == BATCH["input_ids"].double().mean()
    assert "logits" not in scorer(BATCH)


def test_entity_masks_go_to_models_that_take_them() -> None:
    task = LabelCopy(length=40, entities=2, mentions=3, names=4)
    batch = compact(task.batch("train", [0]))

    class Marks(nn.Module):
        def forward(self, input_ids: Tensor, entity_mask: Tensor | None = None) -> Tensor:
            assert entity_mask is not None
            return entity_mask[..., None].float().expand(-1, -1, task.num_classes)

    assert (Scorer(Marks(), task.num_classes)(batch)["logits"] == 1).all()


def test_an_output_that_makes_no_sense_is_named() -> None:
    model = tiny()
    model.forward = lambda input_ids: "nothing"
    with pytest.raises(TypeError, match=r"must return logits .*, got str"):
        Scorer(model, TASK.num_classes)(BATCH)
