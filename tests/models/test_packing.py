"""Batches as Hugging Face's collators pack them, masks, and keywords that nobody knows."""

from typing import Any

import pytest
import torch
from transformers import DataCollatorWithFlattening, DynamicCache

from tests.models.cases import model_of, tokens
from vort.models import VortForCausalLM

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
TEXTS = [tokens(1, n, seed=n)[0] for n in (9, 3, 20)]


def collated(**options: bool) -> dict[str, Any]:
    collator = DataCollatorWithFlattening(return_tensors="pt", **options)
    return dict(collator([{"input_ids": text.tolist()} for text in TEXTS]))


WAYS = {
    "positions": collated(),
    "flash": collated(return_flash_attn_kwargs=True),
    "flash alone": collated(return_position_ids=False, return_flash_attn_kwargs=True),
    "indices": collated(return_position_ids=False, return_seq_idx=True),
    "all": collated(return_seq_idx=True, return_flash_attn_kwargs=True),
}


@pytest.mark.parametrize("memory", ["vort", "paper", "softmax"])
@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_a_flattened_batch_is_its_texts_apart(memory: str, way: str) -> None:
    model, batch = model_of(memory), WAYS[way]
    found = model(**batch, output_hidden_states=True)
    expected = torch.cat([model(text[None]).logits for text in TEXTS], 1)
    torch.testing.assert_close(found.logits, expected, **CLOSE)
    # As a mean over all that is scored, with nothing scored across a seam.
    scored = [(model(text[None], labels=text[None]).loss, len(text) - 1) for text in TEXTS]
    mean = sum(loss * n for loss, n in scored) / sum(n for _, n in scored)
    torch.testing.assert_close(found.loss, mean)


@torch.no_grad()
def test_packed_rows_of_a_batch_are_texts_apart() -> None:
    model, ids = model_of(), tokens(2, 12)
    positions = torch.tensor([[*range(8), *range(4)], [*range(5), *range(7)]])
    found = model(ids, position_ids=positions, output_hidden_states=True, output_orders=True)
    for row, cut in ((0, 8), (1, 5)):
        parts = ids[row : row + 1].tensor_split([cut], 1)
        apart = torch.cat([model(part).logits for part in parts], 1)
        torch.testing.assert_close(found.logits[row], apart[0], **CLOSE)
    assert all(x.shape[:2] == ids.shape for x in (*found.hidden_states, *found.orders))
    assert found.past_key_values is None


def test_gradients_do_not_cross_a_seam() -> None:
    model = model_of().train()
    embedded = model.get_input_embeddings()(tokens(1, 20)).detach().requires_grad_()
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    model(inputs_embeds=embedded, position_ids=positions).logits[:, 8:].sum().backward()
    assert not embedded.grad[:, :8].any()
    assert embedded.grad[:, 8:].any()


@torch.no_grad()
def test_positions_that_generate_sends_are_taken_as_they_are() -> None:
    model, ids = model_of(), tokens(2, 10)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = model(ids, attention_mask=mask).logits
    found = model(ids, attention_mask=mask, position_ids=positions).logits
    assert torch.equal(found, expected)
    cache = model.new_cache()
    model(ids[:, :6], past_key_values=cache, position_ids=torch.arange(6)[None])
    rest = model(ids[:, 6:], past_key_values=cache, position_ids=torch.arange(6, 10)[None])
    torch.testing.assert_close(rest.logits, model(ids).logits[:, 6:], **CLOSE)


@torch.no_grad()
def test_looking_at_positions_breaks_a_graph_and_not_the_result() -> None:
    model, batch = model_of(num_hidden_layers=1), WAYS["positions"]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(**batch).logits, model(**batch).logits, **CLOSE)


@pytest.mark.parametrize("model_class", ["base", "head"])
def test_what_is_not_understood_is_refused(model_class: str) -> None:
    whole, ids = model_of(), tokens(2, 12)
    model = whole if model_class == "head" else whole.model
    with pytest.raises(TypeError, match="no argument 'attenton_mask'; did you mean attention_mask"):
        model(ids, attenton_mask=torch.ones(2, 12))
    with pytest.raises(TypeError, match="no argument 'token_type_ids'"):
        model(ids, token_type_ids=torch.zeros(2, 12))
    with pytest.raises(ValueError, match="attention_mask must cover 12 positions, got 5"):
        model(ids, attention_mask=torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"attention_mask must be \[2, 12 or more\]"):
        model(ids, attention_mask=torch.ones(2, 1, 12, 12))
    with pytest.raises(ValueError, match="batch size 1, got 2"):
        model(ids, cu_seqlens=torch.tensor([0, 5, 12]))
    with pytest.raises(TypeError, match="cu_seqlens must hold integers"):
        model(ids[:1], cu_seqlens=torch.tensor([0.0, 5.0, 12.0]))
    with pytest.raises(ValueError, match="not both"):
        model(ids[:1], torch.tensor([[0] + [1] * 11]), cu_seq_lens_q=torch.tensor([0, 5, 12]))
    with pytest.raises(TypeError, match=r"past_key_values must be a VortCache.*got DynamicCache"):
        model(ids, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="output_attentions must be off"):
        model(ids, output_attentions=True)


def test_labels_are_no_argument_of_the_base_model() -> None:
    with pytest.raises(TypeError, match="VortModel has no argument 'labels'"):
        model_of().model(tokens(1, 5), labels=tokens(1, 5))


def scored(model: VortForCausalLM, **given: Any) -> torch.Tensor:
    loss: torch.Tensor = model(tokens(2, 12), use_cache=False, **given).loss
    return loss


@pytest.mark.parametrize("training", [False, True])
def test_shifted_labels_are_scored_as_they_stand(training: bool) -> None:
    model, ids = model_of().train(training), tokens(2, 12)
    shifted = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], 1)
    expected = scored(model, labels=ids)
    torch.testing.assert_close(scored(model, shift_labels=shifted), expected)
    # They win over labels, as everywhere in transformers.
    torch.testing.assert_close(scored(model, labels=ids.flip(1), shift_labels=shifted), expected)
    divided = scored(model, shift_labels=shifted, num_items_in_batch=5)
    torch.testing.assert_close(divided, expected * 22 / 5)
    with pytest.raises(ValueError, match=r"labels must be \[2, 12\]"):
        scored(model, labels=ids[:, 1:])


def test_labels_score_the_positions_that_are_kept() -> None:
    model, ids = model_of(), tokens(2, 12)
    logits = model(ids).logits[:, -5:-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, -4:].flatten())
    torch.testing.assert_close(scored(model, labels=ids, logits_to_keep=5), expected)
