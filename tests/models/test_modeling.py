from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from transformers import AutoModel, AutoModelForCausalLM

from tests.layers.cases import masks
from tests.memories.cases import NAMES
from tests.models.cases import WINDOW, config_of, model_of, tokens
from vort.layers.packing import Packing
from vort.memories.retention_memory import RetentionMemory
from vort.models import VortForCausalLM, VortModel, modeling_vort

KINDS = (*NAMES, "paper")
MODELS = {kind: model_of(kind) for kind in KINDS}
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def test_auto_classes_know_the_model() -> None:
    assert isinstance(AutoModelForCausalLM.from_config(config_of()), VortForCausalLM)
    assert isinstance(AutoModel.from_config(config_of()), VortModel)


@pytest.mark.parametrize("kind", KINDS)
@given(cuts=st.lists(st.integers(0, 8 * WINDOW), max_size=4))
@settings(max_examples=5)
@torch.no_grad()
def test_pieces_equal_the_whole(kind: str, cuts: list[int]) -> None:
    model, ids = MODELS[kind], tokens(2, 8 * WINDOW)
    expected = model(ids).logits
    cache, outputs, start = model.new_cache(), [], 0
    for stop in [*sorted(cuts), ids.shape[1]]:
        if stop > start:
            piece = model(ids[:, start:stop], past_key_values=cache, use_cache=True)
            outputs.append(piece.logits)
            start = stop
    torch.testing.assert_close(torch.cat(outputs, 1), expected, **CLOSE)
    assert cache.get_seq_length() == ids.shape[1]


@pytest.mark.parametrize("kind", KINDS)
@given(mask=masks())
@settings(max_examples=5)
@torch.no_grad()
def test_padded_rows_equal_unpadded_ones(kind: str, mask: torch.Tensor) -> None:
    model, ids = MODELS[kind], tokens(*mask.shape)
    logits = model(ids.masked_fill(~mask, 0), attention_mask=mask.long()).logits
    for row in range(len(mask)):
        if mask[row].any():
            alone = model(ids[row, mask[row]].unsqueeze(0)).logits[0]
            torch.testing.assert_close(logits[row, mask[row]], alone, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
@given(mask=masks())
@settings(max_examples=5)
def test_on_a_gpu_padding_is_left_out_of_all_layers(kind: str, mask: torch.Tensor) -> None:
    """Tokens alone go through them, in one packed row: what comes back is the same."""
    model, ids = MODELS[kind], tokens(*mask.shape)
    packs = all(isinstance(b.self_attn.memory, RetentionMemory) for b in model.model.layers)
    options: dict[str, Any] = {"attention_mask": mask.long()}
    options |= {"labels": ids.masked_fill(~mask, -100), "use_cache": False}
    options |= {"output_hidden_states": True, "output_orders": kind == "vort"}
    found = []
    for alone in (False, True):
        with (
            mock.patch.object(modeling_vort, "packs_well", return_value=alone),
            mock.patch.object(Packing, "of_tokens", wraps=Packing.of_tokens) as made,
        ):
            result = model(ids, **options)
        assert made.called == (alone and packs and not bool(mask.all()))
        states = [*result.hidden_states, *(result.orders or ())]
        grads = []
        if bool((options["labels"][:, 1:] >= 0).any()):
            grads = torch.autograd.grad(
                result.loss, list(model.parameters()), allow_unused=True, materialize_grads=True
            )
        found.append(([x[mask] for x in (result.logits, *states)], grads))
    for got, wanted in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(list(got), list(wanted), **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4))
@settings(max_examples=5)
@torch.no_grad()
def test_packed_rows_equal_separate_ones(kind: str, lengths: list[int]) -> None:
    model, ids = MODELS[kind], tokens(1, sum(lengths))
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    packed = model(ids, cu_seqlens=bounds).logits
    alone = [model(part).logits for part in ids.split(lengths, 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_future_never_reaches_the_past(kind: str) -> None:
    model, ids = MODELS[kind], tokens(1, 40)
    changed = torch.cat([ids[:, :30], tokens(1, 10, seed=1)], 1)
    before, after = model(ids).logits[:, :30], model(changed).logits[:, :30]
    torch.testing.assert_close(before, after, atol=0, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("marked", [True, False])
def test_padding_is_scored_on_nothing(side: str, marked: bool) -> None:
    """Nor is a token scored on it, be it marked in the labels or not."""
    model, ids = MODELS["vort"], tokens(1, 12)
    padding = torch.zeros(1, 5, dtype=torch.long)
    beside = (lambda x, y: [y, x]) if side == "left" else (lambda x, y: [x, y])
    padded, mask = (torch.cat(beside(x, padding), 1) for x in (ids, torch.ones_like(ids)))
    labels = padded.masked_fill(mask == 0, -100) if marked else padded
    got = model(padded, attention_mask=mask, labels=labels).loss
    torch.testing.assert_close(got, model(ids, labels=ids).loss, **CLOSE)


def test_shifted_labels_may_name_what_stands_in_padding() -> None:
    model, ids = MODELS["vort"], tokens(1, 8)
    mask, shifted = torch.ones_like(ids), ids.roll(-1, 1)
    mask[:, 6:] = 0
    found = model(ids, attention_mask=mask, shift_labels=shifted)
    expected = torch.nn.functional.cross_entropy(found.logits[0, :6], shifted[0, :6])
    torch.testing.assert_close(found.loss, expected)


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
def test_labels_of_no_position_are_refused(name: str) -> None:
    none = tokens(2, 5)[:, :0]
    with pytest.raises(ValueError, match=r"labels must be of at least one position, got \[2, 0\]"):
        MODELS["vort"](none, **{name: none})


@torch.no_grad()
def test_tokens_and_masks_of_other_kinds_are_refused() -> None:
    model, ids = MODELS["vort"], tokens(2, 6)
    with pytest.raises(ValueError, match=r"input_ids must be \[B, T\].*got shape \(6,\)"):
        model(ids[0])
    added = torch.zeros(2, 6)
    added[0, :2] = torch.finfo(added.dtype).min
    with pytest.raises(ValueError, match="attention_mask must be 1 at tokens and 0 at padding"):
        model(ids, attention_mask=added)


def test_the_loss_is_cross_entropy_of_the_next_token() -> None:
    model, ids = MODELS["vort"], tokens(2, 20)
    labels = ids.clone()
    labels[:, :5] = -100
    found = model(ids, labels=labels)
    scores = found.logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(scores, labels[:, 1:].flatten())
    torch.testing.assert_close(found.loss, expected)


@torch.no_grad()
def test_optional_outputs() -> None:
    model, ids = MODELS["vort"], tokens(2, 20)
    found = model(ids, output_hidden_states=True, output_orders=True)
    assert len(found.hidden_states) == 3
    assert [order.shape for order in found.orders] == [(2, 20, 2)] * 2
    torch.testing.assert_close(model.lm_head(found.hidden_states[-1]), found.logits)
    assert model(ids, logits_to_keep=3).logits.shape[1] == 3
    kept = model(ids, logits_to_keep=torch.tensor([0, 7])).logits
    torch.testing.assert_close(kept, found.logits[:, [0, 7]])
    as_tuple = model(ids, return_dict=False, use_cache=False)
    torch.testing.assert_close(as_tuple[0], found.logits)
    from_embeddings = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
    torch.testing.assert_close(from_embeddings, found.logits)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()


@torch.no_grad()
def test_entities_change_orders_where_the_router_sees_them() -> None:
    ids, entity = tokens(1, 20), torch.zeros(1, 20)
    entity[:, 5] = 1
    model = MODELS["paper"]
    plain, marked = (
        model(ids, entity_mask=mask, output_orders=True).orders[0] for mask in (None, entity)
    )
    changed = (plain != marked).any(-1)[0]
    assert changed.tolist() == [position == 5 for position in range(20)]


def test_gradient_checkpointing_changes_nothing() -> None:
    gradients = []
    for checkpointing in (False, True):
        model = model_of().train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(tokens(2, 30), labels=tokens(2, 30)).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, wanted in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_model_reads_a_cache_and_leaves_it(reentrant: bool, static: bool) -> None:
    found = []
    for checkpointing in (False, True):
        model, ids = model_of().train(), tokens(2, 30)
        cache = model.new_cache(static=static)
        with torch.no_grad():
            model(ids[:, :12], past_key_values=cache, use_cache=True)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            with pytest.raises(ValueError, match="use_cache must be False with gradient"):
                model(ids[:, 12:], past_key_values=cache, use_cache=True)
        loss = model(ids[:, 12:], past_key_values=cache, labels=ids[:, 12:]).loss
        if checkpointing:  # what is read again in the backward is what was read
            with torch.no_grad():
                model.eval()(ids[:, 12:], past_key_values=cache, use_cache=True)
            model.train()
        loss.backward()
        found.append((loss, {name: p.grad for name, p in model.named_parameters()}))
    torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=1e-5)


def test_back_propagation_goes_through_a_cache() -> None:
    model, ids = model_of(), tokens(1, 20)
    cache = model.new_cache()
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    model(inputs_embeds=embeddings[:, :10], past_key_values=cache, use_cache=True)
    later = model(inputs_embeds=embeddings[:, 10:], past_key_values=cache, use_cache=True)
    later.logits.sum().backward()
    assert embeddings.grad[:, :10].abs().sum() > 0
    cache.detach()
    assert not any(x.requires_grad for state in cache.states.values() for x in state.values())


def test_where_kernels_do_the_work_the_compiler_leaves_blocks_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(modeling_vort, "_leaves_to_kernels", lambda hidden: True)
    torch._dynamo.reset()
    model, ids = model_of("vort"), tokens(2, 20)
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, backend=backend)
    found = compiled(ids, labels=ids, use_cache=False)
    wanted = model(ids, labels=ids, use_cache=False)
    assert torch.equal(found.logits, wanted.logits)
    assert torch.equal(found.loss, wanted.loss)
    assert 0 < len(graphs) <= 6
    torch._dynamo.reset()


def test_compiled_forward_and_backward_equal_eager_in_one_graph() -> None:
    model, ids = model_of(num_hidden_layers=1), tokens(2, 20)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for padding in (0, 7):
        mask = torch.ones(2, 20, dtype=torch.long)
        mask[1, :padding] = 0
        expected = model(ids, attention_mask=mask, use_cache=False).logits
        found = compiled(ids, attention_mask=mask, use_cache=False).logits
        real = mask.bool()
        torch.testing.assert_close(found[real], expected[real], **CLOSE)
        model.zero_grad()
        found[real].sum().backward()
        assert model.lm_head.weight.grad.isfinite().all()


@torch.no_grad()
def test_a_new_horizon_is_saved_with_the_model(tmp_path) -> None:
    model, ids = model_of(), tokens(1, 30)
    before = model(ids).logits
    model.set_horizon(4096)
    after = model(ids).logits
    assert not torch.equal(before, after)
    model.save_pretrained(tmp_path)
    loaded = VortForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config.horizon == 4096
    torch.testing.assert_close(loaded(ids).logits, after, atol=0, rtol=0)


@pytest.mark.parametrize("horizon", [0, -5, 2.5, True, "10", None, float("nan")])
@torch.no_grad()
def test_a_horizon_that_is_refused_changes_nothing(horizon: Any) -> None:
    for model, error in ((model_of(), ValueError), (model_of("paper"), ValueError)):
        ids = tokens(1, 30)
        before = model(ids).logits, model.config.horizon
        for asked in (model, model.model.layers[0].self_attn):
            with pytest.raises(error, match="horizon must be a whole number >= 1, got"):
                asked.set_horizon(horizon)
        assert torch.equal(model(ids).logits, before[0])
        assert model.config.horizon == before[1]


@pytest.mark.parametrize("horizon", [4e3, np.int64(4000), torch.tensor(4000)], ids=repr)
def test_a_horizon_is_a_whole_number_however_it_is_spelled(horizon: Any) -> None:
    model = model_of()
    model.set_horizon(horizon)
    assert type(model.config.horizon) is int
    assert model.config.horizon == model.model.memories[0].router.horizon == 4000
    heard = []
    for memory in model.model.memories:
        memory.set_horizon = heard.append
    model.set_horizon(horizon)
    assert [type(each) for each in heard] == [int] * len(heard) != []


@torch.no_grad()
def test_an_entity_mask_is_looked_at_or_refused() -> None:
    ids, model = tokens(2, 7), model_of(use_entity=True)
    marks = torch.zeros(2, 9)
    marks[:, 4] = 1
    given = model(ids, entity_mask=marks).logits
    assert torch.equal(given, model(ids, entity_mask=marks[:, 2:]).logits)
    assert not torch.equal(given, model(ids).logits)
    for wrong, words in ((marks[:1], r"\[2, 7 or more\]"), (marks[:, :6], "cover 7 positions")):
        for asked, x in ((model, ids), (model.model.layers[0].self_attn, torch.randn(2, 7, 32))):
            with pytest.raises(ValueError, match=f"entity_mask must.*{words}"):
                asked(x, entity_mask=wrong)
    for deaf in (model_of(), model_of("gla", use_entity=True)):
        for asked, x in ((deaf, ids), (deaf.model.layers[0].self_attn, torch.randn(2, 7, 32))):
            with pytest.raises(ValueError, match="entity_mask needs a memory that looks at it"):
                asked(x, entity_mask=marks)


def test_a_mask_of_a_past_that_is_not_there_is_refused() -> None:
    model, mask = model_of(), torch.ones(2, 9)
    for asked, x in (
        (model, tokens(2, 7)),
        (model.model.layers[0].self_attn, torch.ones(2, 7, 32)),
    ):
        with pytest.raises(ValueError, match="of 7 positions where past_key_values is None, got 9"):
            asked(x, attention_mask=mask)


@pytest.mark.parametrize("wrong", [0.5, float("nan"), 2.0])
def test_a_mask_that_is_neither_is_refused(wrong: float) -> None:
    mask = torch.ones(1, 7)
    mask[0, 3] = wrong
    with pytest.raises(ValueError, match=f"1 at tokens and 0 at padding, got {wrong:.3g} in it"):
        model_of()(tokens(1, 7), attention_mask=mask)


@torch.no_grad()
def test_layers_that_look_at_no_entities_stand_beside_those_that_do() -> None:
    model, ids = model_of(use_entity=True, layer_memories=["vort", "gla"]), tokens(2, 7)
    marked = model(ids, entity_mask=torch.ones(2, 7)).logits
    assert not torch.equal(marked, model(ids).logits)


@torch.no_grad()
def test_half_precision_decodes_like_it_reads() -> None:
    model, ids = model_of().bfloat16(), tokens(1, 30)
    whole = model(ids).logits.float()
    cache, outputs = model.new_cache(), []
    for position in range(30):
        piece = ids[:, position : position + 1]
        outputs.append(model(piece, past_key_values=cache, use_cache=True).logits.float())
    scale = whole.std()
    assert (torch.cat(outputs, 1) - whole).abs().max() < 0.1 * scale
    memory = cache.load_state(0)["memory.G"]
    assert memory.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_precision_trains_and_stays_near_single(kind: str) -> None:
    model, ids = model_of(kind).train(), tokens(2, 30)
    expected = model(ids, labels=ids).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids).loss
    torch.testing.assert_close(loss, expected, atol=0.1, rtol=0.05)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name


@torch.no_grad()
def test_weights_kept_elsewhere_are_brought_by_whoever_keeps_them() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, ids = model_of(), tokens(2, 12)
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    expected, text = model(ids).logits, model.generate(ids, **options)
    accelerate.cpu_offload(model, execution_device="cpu")
    torch.testing.assert_close(model(ids).logits, expected, **CLOSE)
    assert torch.equal(model.generate(ids, **options), text)


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("layers", [1, 3])
@torch.no_grad()
def test_a_cache_of_other_layers_is_refused(layers: int, length: int) -> None:
    cache = (other := model_of(num_hidden_layers=layers)).new_cache()
    other(tokens(1, 5), past_key_values=cache, use_cache=True)
    for call in ((model := model_of()), model.model):
        with pytest.raises(ValueError, match=f"as the model has, 2, got a cache of {layers}"):
            call(tokens(1, length), past_key_values=cache, use_cache=True)


# Of a horizon whose basis need not be fitted: that takes numbers. What is kept for the next call,
# as tables of a basis are, has the numbers that another call gave it.
@pytest.mark.parametrize(
    ("kind", "where"),
    [*((kind, "meta") for kind in KINDS), *((kind, "fake") for kind in ("vort", "gla"))],
)
def test_a_model_without_numbers_has_shapes_and_gradients(kind: str, where: str) -> None:
    with torch.device("meta") if where == "meta" else FakeTensorMode(allow_non_fake_inputs=True):
        model = VortForCausalLM(config_of(kind))
        ids = torch.zeros(1, 8, dtype=torch.int64)
        assert model.eval()(ids).logits.shape == (1, 8, model.config.vocab_size)
        found = model.train()(ids, labels=ids)
        found.loss.backward()
        assert found.loss.shape == ()
        assert all(p.grad.shape == p.shape for p in model.parameters() if p.grad is not None)
        assert model.lm_head.weight.grad is not None
