import copy
import logging

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from tests.memories.cases import NAMES
from tests.models.cases import WINDOW, model_of, tokens
from vort.layers import LayerStates
from vort.models import ByteTokenizer, VortCache, VortForCausalLM, prefill

LONG = 5 * WINDOW
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize("memory", [*NAMES, "paper"])
@torch.no_grad()
def test_cached_decoding_equals_the_full_forward_at_every_position(memory: str) -> None:
    model, prompt = model_of(memory), tokens(2, LONG)
    found = model.generate(
        prompt, max_new_tokens=15, output_logits=True, return_dict_in_generate=True, **GREEDY
    )
    full = model(found.sequences).logits
    steps = torch.stack(found.logits, 1)
    torch.testing.assert_close(steps, full[:, LONG - 1 : -1], atol=1e-4, rtol=1e-4)
    assert torch.equal(full[:, LONG - 1 : -1].argmax(-1), found.sequences[:, LONG:])


@pytest.mark.parametrize("memory", ["vort", "paper", "softmax", "gla"])
@torch.no_grad()
def test_left_padded_rows_generate_what_they_would_alone(memory: str) -> None:
    model, prompt = model_of(memory), tokens(3, LONG)
    pads = (0, 11, LONG - 2)
    mask = torch.ones_like(prompt)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    padded = prompt.masked_fill(mask == 0, 0)
    options = {**GREEDY, "max_new_tokens": 12}
    for extra in ({}, {"num_beams": 3}, {"cache_implementation": "static"}):
        together = model.generate(padded, attention_mask=mask, **options, **extra)
        for row, pad in enumerate(pads):
            alone = model.generate(prompt[row : row + 1, pad:], **options, **extra)
            assert torch.equal(together[row, LONG:], alone[0, LONG - pad :])


@pytest.mark.parametrize("beams", [2, 4])
@torch.no_grad()
def test_beam_search_with_a_cache_equals_beam_search_without(beams: int) -> None:
    model, prompt = model_of(), tokens(2, LONG)
    mask = torch.ones_like(prompt)
    mask[1, :9] = 0
    options = {**GREEDY, "num_beams": beams, "max_new_tokens": 10, "attention_mask": mask}
    cached = model.generate(prompt, **options)
    assert torch.equal(cached, model.generate(prompt, use_cache=False, **options))


@torch.no_grad()
def test_sampling_returns_what_was_asked_for() -> None:
    model, prompt = model_of(), tokens(2, LONG)
    options = {"do_sample": True, "max_new_tokens": 5, "eos_token_id": None, "pad_token_id": 0}
    assert model.generate(prompt, num_return_sequences=3, **options).shape == (6, LONG + 5)
    torch.manual_seed(1)
    cached = model.generate(prompt, **options)
    torch.manual_seed(1)
    assert torch.equal(cached, model.generate(prompt, use_cache=False, **options))


@torch.no_grad()
def test_a_static_cache_keeps_its_addresses() -> None:
    model, prompt = model_of(), tokens(2, LONG)
    expected = model.generate(prompt, max_new_tokens=8, **GREEDY)
    found = model.generate(prompt, max_new_tokens=8, cache_implementation="static", **GREEDY)
    assert torch.equal(found, expected)
    cache = model.new_cache(static=True)
    model(prompt, past_key_values=cache, use_cache=True)
    addresses = [x.data_ptr() for state in cache.states.values() for x in state.values()]
    model(prompt[:, :1], past_key_values=cache, use_cache=True)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.reset()
    assert addresses == [x.data_ptr() for state in cache.states.values() for x in state.values()]
    again = model(prompt, past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(again, model(prompt).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@torch.no_grad()
def test_compiled_decoding_equals_reading_in_one_graph() -> None:
    model, ids = model_of(num_hidden_layers=1), tokens(2, LONG)
    cache = model.new_cache(static=True)
    model(ids[:, :10], past_key_values=cache, use_cache=True)
    torch._dynamo.reset()
    step = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    outputs = []
    for position in range(10, LONG):
        piece = ids[:, position : position + 1]
        outputs.append(step(piece, past_key_values=cache, use_cache=True).logits)
    expected = model(ids).logits[:, 10:]
    torch.testing.assert_close(torch.cat(outputs, 1), expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_generation_goes_on_from_a_cache() -> None:
    model, prompt = model_of(), tokens(1, LONG)
    cache = model.new_cache()
    model(prompt[:, :-1], past_key_values=cache, use_cache=True)
    branch = copy.deepcopy(cache)
    expected = model.generate(prompt, max_new_tokens=8, **GREEDY)
    for start in (cache, branch):
        found = model.generate(prompt, past_key_values=start, max_new_tokens=8, **GREEDY)
        assert torch.equal(found, expected)


@torch.no_grad()
def test_the_cache_does_not_grow() -> None:
    model, cache, sizes = model_of(), None, []
    for position in range(3 * WINDOW):
        found = model(tokens(2, 1, seed=position), past_key_values=cache, use_cache=True)
        cache = found.past_key_values
        sizes.append(cache.nbytes)
    assert len(set(sizes)) == 1
    assert cache.get_seq_length() == 3 * WINDOW


@torch.no_grad()
def test_rows_of_a_cache_can_be_repeated_and_selected() -> None:
    model, prompt = model_of(), tokens(2, LONG)
    cache = model.new_cache()
    model(prompt, past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    found = model(tokens(2, 1), past_key_values=cache, use_cache=True).logits
    swapped = torch.cat([prompt.flip(0), tokens(2, 1)], 1)
    torch.testing.assert_close(found, model(swapped).logits[:, -1:], atol=1e-4, rtol=1e-4)


def test_what_a_memory_cannot_do_is_refused_in_words() -> None:
    model, cache = model_of(), VortCache(2)
    with pytest.raises(NotImplementedError, match="cannot be cropped"):
        cache.crop(-1)
    with pytest.raises(NotImplementedError, match="keeps states"):
        cache.update(torch.zeros(1), torch.zeros(1), 0)
    with pytest.raises(TypeError, match="past_key_values must be a VortCache"):
        model.generate(tokens(1, 4), past_key_values=DynamicCache(), max_new_tokens=2)


@torch.no_grad()
def test_entities_of_the_prompt_reach_generation() -> None:
    model, prompt = model_of("paper"), tokens(1, LONG)
    entity = torch.ones_like(prompt)
    cache = model.new_cache()
    model(prompt, entity_mask=entity, past_key_values=cache, use_cache=True)
    used = model.new_cache()
    model.generate(prompt, entity_mask=entity, past_key_values=used, max_new_tokens=1, **GREEDY)
    torch.testing.assert_close(used.load_state(0), cache.load_state(0))


@torch.no_grad()
def model_of_entities() -> VortForCausalLM:
    """A model whose orders an entity moves from one end to the other."""
    model = model_of(use_entity=True)
    for memory in model.model.memories:
        memory.router.order.weight[:, -1] = 8.0
    return model


@pytest.mark.parametrize(
    "extra", [{"use_cache": False}, {"prefill_chunk_size": 1}, {"prefill_chunk_size": 7}], ids=str
)
@torch.no_grad()
def test_entities_are_where_they_are_however_a_prompt_is_read(extra: dict[str, int]) -> None:
    model, prompt = model_of_entities(), tokens(2, LONG)
    entity = torch.randint(2, prompt.shape, generator=torch.Generator().manual_seed(1))
    options = {
        "max_new_tokens": 4,
        "output_logits": True,
        "return_dict_in_generate": True,
        **GREEDY,
    }
    found = model.generate(prompt, entity_mask=entity, **options, **extra)
    marks = torch.nn.functional.pad(entity, (0, 4))
    full = model(found.sequences, entity_mask=marks).logits[:, LONG - 1 : -1]
    torch.testing.assert_close(torch.stack(found.logits, 1), full, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(full, model(found.sequences).logits[:, LONG - 1 : -1], atol=1e-2)


@torch.no_grad()
def test_entities_go_on_from_a_cache() -> None:
    model, prompt = model_of_entities(), tokens(2, LONG)
    entity = torch.ones_like(prompt)
    expected = model.generate(prompt, entity_mask=entity, max_new_tokens=4, **GREEDY)
    for seen in (LONG - 1, 9):
        for extra in ({}, {"prefill_chunk_size": 7}):
            cache = model.new_cache()
            model(prompt[:, :seen], entity_mask=entity[:, :seen], past_key_values=cache)
            given = {"entity_mask": entity, "past_key_values": cache, **GREEDY, **extra}
            assert torch.equal(model.generate(prompt, max_new_tokens=4, **given), expected)
    with pytest.raises(ValueError, match=f"entity_mask must cover {LONG} tokens.*got 3"):
        model.generate(prompt, entity_mask=entity[:, :3], max_new_tokens=4, **GREEDY)


@pytest.mark.parametrize("extra", [{}, {"cache_implementation": "static"}], ids=str)
@torch.no_grad()
def test_generation_takes_embeddings_for_a_prompt(extra: dict[str, str]) -> None:
    model, prompt = model_of(), tokens(2, LONG)
    expected = model.generate(prompt, max_new_tokens=6, **GREEDY)[:, LONG:]
    embedded = model.get_input_embeddings()(prompt)
    found = model.generate(inputs_embeds=embedded, max_new_tokens=6, **GREEDY, **extra)
    assert torch.equal(found, expected)
    mask = torch.ones_like(prompt)
    mask[1, :9] = 0
    expected = model.generate(prompt, attention_mask=mask, max_new_tokens=6, **GREEDY)[:, LONG:]
    options = {"attention_mask": mask, "max_new_tokens": 6, **GREEDY, **extra}
    assert torch.equal(model.generate(inputs_embeds=embedded, **options), expected)


@pytest.mark.parametrize("inputs", ["input_ids", "inputs_embeds"])
@pytest.mark.parametrize("beams", [1, 3])
@torch.no_grad()
def test_a_checkpointed_model_generates_in_training_what_it_generates_later(
    inputs: str, beams: int
) -> None:
    model, prompt = model_of(), tokens(2, LONG)
    given = {"input_ids": prompt, "inputs_embeds": model.get_input_embeddings()(prompt)}
    options = {inputs: given[inputs], "max_new_tokens": 6, "num_beams": beams, **GREEDY}
    expected = model.generate(**options)
    model.train().gradient_checkpointing_enable()
    assert torch.equal(model.generate(**options), expected)
    with pytest.raises(ValueError, match="past_key_values must be left out"):
        model.generate(**options, past_key_values=model.new_cache())


@torch.no_grad()
def test_a_memory_without_states_takes_embeddings_for_a_prompt() -> None:
    model, prompt = model_of("exact_power_law", read_weights=False), tokens(2, 9)
    expected = model.generate(prompt, max_new_tokens=5, **GREEDY)
    embedded = model.get_input_embeddings()(prompt)
    found = model.generate(inputs_embeds=embedded, max_new_tokens=5, **GREEDY)
    assert torch.equal(found, expected[:, 9:])
    both = model.generate(prompt, inputs_embeds=embedded, max_new_tokens=5, **GREEDY)
    assert torch.equal(both, expected)


@pytest.mark.parametrize("left", [0, -3])
@torch.no_grad()
def test_a_cache_that_has_seen_the_whole_prompt_is_refused(left: int) -> None:
    model, prompt = model_of(), tokens(2, LONG)
    cache = model.new_cache()
    model(prompt, past_key_values=cache)
    given = {"past_key_values": cache, "max_new_tokens": 4, **GREEDY}
    with pytest.raises(ValueError, match=f"got {LONG} seen of {LONG + left}"):
        model.generate(prompt[:, : LONG + left], **given)


@torch.no_grad()
def test_what_was_written_after_the_end_of_a_row_cannot_be_hidden_later() -> None:
    model, prompt = model_of(), tokens(2, LONG)
    prompt[0, :9] = 0
    mask = torch.ones_like(prompt)
    mask[0, :9] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, **GREEDY}
    end = int(model.generate(prompt, **options)[1, LONG])
    options |= {"eos_token_id": end, "return_dict_in_generate": True}
    found = model.generate(prompt, **options)
    assert (found.sequences[1, LONG + 1 :] == 0).all()
    text = torch.cat([found.sequences, tokens(2, 5)], 1)
    shown = torch.nn.functional.pad(mask, (0, text.shape[1] - LONG), value=1)
    cache = copy.deepcopy(found.past_key_values)
    anew = model.generate(text, attention_mask=shown, max_new_tokens=4, **GREEDY)
    given = {"attention_mask": shown, "max_new_tokens": 4, **GREEDY}
    assert torch.equal(model.generate(text, past_key_values=cache, **given), anew)
    shown[1, LONG + 1 : -5] = 0
    with pytest.raises(ValueError, match=r"hides \d tokens of row 1 that past_key_values has read"):
        model.generate(text, past_key_values=found.past_key_values, **given)


def test_continuous_batching_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="pages keys and values"):
        model_of().generate_batch([[3, 4], [5]])


@torch.no_grad()
def test_a_cache_is_refused_where_everything_is_read_anew() -> None:
    model, prompt = model_of(), tokens(2, LONG)
    given = {"past_key_values": model.new_cache(), "use_cache": False, **GREEDY}
    with pytest.raises(ValueError, match=r"must be left out.*with use_cache=False"):
        model.generate(prompt, max_new_tokens=4, **given)


@pytest.mark.parametrize("rows", [1, 2])
@torch.no_grad()
def test_a_configuration_that_keeps_no_cache_moves_none_on(rows: int) -> None:
    model, ids = model_of(), tokens(rows, LONG)
    cache = model.new_cache()
    model(ids[:, :-1], past_key_values=cache)
    model.config.use_cache = False
    for _ in range(2):
        found = model(ids[:, -1:], past_key_values=cache)
        torch.testing.assert_close(found.logits, model(ids).logits[:, -1:], atol=1e-4, rtol=1e-4)
        assert found.past_key_values is None
    assert cache.get_seq_length() == LONG - 1


@pytest.mark.parametrize("chunk", [1, 7, LONG])
@torch.no_grad()
def test_a_prompt_may_be_read_in_chunks(chunk: int) -> None:
    model, prompt = model_of(), tokens(2, LONG)
    mask = torch.ones_like(prompt)
    mask[0, :11] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, **GREEDY}
    expected = model.generate(prompt, **options)
    assert torch.equal(model.generate(prompt, prefill_chunk_size=chunk, **options), expected)


@torch.no_grad()
def test_generation_stops_at_a_string() -> None:
    """`generate` hands the tokenizer on to the model, which refuses what it does not know."""
    model, tokenizer = model_of(vocab_size=259), ByteTokenizer()
    prompt = tokenizer("It was", return_tensors="pt")
    free = model.generate(**prompt, max_new_tokens=8, **GREEDY)
    options = {"stop_strings": ["no model says this"], "tokenizer": tokenizer, **GREEDY}
    assert torch.equal(model.generate(**prompt, max_new_tokens=8, **options), free)


@pytest.mark.parametrize(("memory", "reminded"), [("vort", False), ("softmax", True)])
@torch.no_grad()
def test_only_a_cache_that_grows_has_a_length_to_be_reminded_of(
    memory: str, reminded: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model = model_of(memory, max_position_embeddings=10)
    model.generate(tokens(1, 8), max_new_tokens=9, **GREEDY)
    assert ("predefined maximum length" in caplog.text) == reminded


@torch.no_grad()
def test_a_memory_without_states_is_scored_and_generates_by_reading_anew() -> None:
    model, prompt = model_of("exact_power_law", read_weights=False), tokens(1, 9)
    found = model(prompt)
    assert found.past_key_values is None
    text = model.generate(prompt, max_new_tokens=4, **GREEDY)
    assert torch.equal(model(text).logits[:, 8:-1].argmax(-1), text[:, 9:])
    with pytest.raises(ValueError, match="keeps no state"):
        model(prompt, use_cache=True)


def test_only_states_of_fixed_size_are_compiled() -> None:
    compiled = {"vort": True, "softmax": False, "exact_power_law": False}
    for memory, expected in compiled.items():
        settings = {} if memory == "vort" else {"read_weights": False}
        assert model_of(memory, **settings).new_cache(static=True).is_compileable is expected
    bounded = model_of("softmax", softmax_cache_size=7).new_cache(static=True)
    assert bounded.is_compileable


@torch.no_grad()
def test_states_in_bfloat16_take_half_the_room_and_change_little() -> None:
    model, ids = model_of(), tokens(2, 40)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        cache = model.new_cache(state_dtype=dtype)
        model(ids[:, :8], past_key_values=cache, use_cache=True)
        steps = [
            model(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits
            for t in range(8, 40)
        ]
        assert cache.states[0]["memory.G"].dtype == dtype
        assert cache.load_state(0)["memory.G"].dtype == torch.float32
        found[dtype] = torch.cat(steps, 1), cache.states[0]["memory.G"].nbytes
    (wide, size), (narrow, half) = found.values()
    assert half * 2 == size
    assert 0 < (wide - narrow).norm() < 5e-3 * wide.norm()


@torch.no_grad()
def test_what_narrow_states_forget_is_right_on_average() -> None:
    cache = LayerStates(state_dtype=torch.bfloat16)
    x = torch.full((1, 2, 4, 32, 32), 1.37, dtype=torch.bfloat16).float()
    cache.store_state(0, {"memory.G": x}, 1)
    for _ in range(50):
        # a fraction of bfloat16's last bit, which rounding to the nearest would lose every time
        kept = cache.load_state(0)["memory.G"] * 0.9995
        cache.store_state(0, {"memory.G": kept}, 1)
    lost = 1 - cache.load_state(0)["memory.G"].double().mean() / x.double().mean()
    assert abs(lost / (1 - 0.9995**50) - 1) < 0.05


def test_narrow_states_are_refused_where_there_are_none() -> None:
    with pytest.raises(ValueError, match=r"needs a memory of decaying states.*got memory softmax"):
        model_of("softmax").new_cache(state_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"float32 or torch\.bfloat16, got torch\.float16"):
        VortCache(2, state_dtype=torch.float16)


@torch.no_grad()
def test_a_generated_token_brings_no_mask() -> None:
    model, prompt = model_of(), tokens(2, 12)
    mask = torch.ones_like(prompt)
    mask[0, :5] = 0
    seen = []
    forward = model.model.forward

    def watched(*args, **kwargs):
        seen.append(kwargs["attention_mask"])
        return forward(*args, **kwargs)

    model.model.forward = watched
    model.generate(prompt, attention_mask=mask, max_new_tokens=4, **GREEDY)
    assert torch.equal(seen[0], mask)
    assert seen[1:] == [None] * 3


@pytest.mark.parametrize("memory", ["vort", "softmax"])
@torch.no_grad()
def test_a_long_prompt_is_read_in_pieces(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = model_of(memory), tokens(2, LONG)
    mask = torch.ones_like(prompt)
    mask[0, : LONG // 2] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, **GREEDY}
    whole = model.generate(prompt, **options)
    calls = []
    inner = model.model.forward
    monkeypatch.setattr(
        model.model,
        "forward",
        lambda *a, **k: calls.append(a[0].shape[1] if a else 1) or inner(*a, **k),
    )
    monkeypatch.setattr(prefill, "PIECE", 2 * (LONG // 3))
    assert torch.equal(model.generate(prompt, **options), whole)
    assert calls[:4] == [LONG // 3] * 3 + [LONG % 3][: LONG % 3 > 0] + [1] * (LONG % 3 == 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cu_seqlens", torch.tensor([0, 4, 8])),
        ("cu_seq_lens_q", torch.tensor([0, 4, 8])),
        ("position_ids", torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])),
        ("seq_idx", torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_several_prompts_in_a_row_are_refused(name: str, value: Tensor) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .*give each sequence a row, padded"):
        model_of().generate(tokens(1, 8), **{name: value}, max_new_tokens=1, **GREEDY)


def test_positions_that_count_up_may_be_given() -> None:
    model, ids = model_of(), tokens(1, 8)
    expected = model.generate(ids, max_new_tokens=2, **GREEDY)
    found = model.generate(ids, position_ids=torch.arange(8)[None], max_new_tokens=2, **GREEDY)
    assert torch.equal(found, expected)


@torch.no_grad()
def test_positions_of_a_padded_turn_after_a_past_may_be_given() -> None:
    model, options = model_of(), {"max_new_tokens": 3, **GREEDY}
    cache = model.new_cache()
    before = model.generate(tokens(2, 6), past_key_values=cache, **options)
    prompt = torch.cat([before, tokens(2, 5, seed=1)], 1)
    mask = torch.ones_like(prompt)
    mask[1, -5:-3] = 0  # padding to the left of a shorter turn
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    options["attention_mask"] = mask
    expected = model.generate(prompt, past_key_values=cache.copy(), **options)
    for given in (positions, positions[:, -6:]):  # of all, or of what is new
        options["position_ids"] = given
        found = model.generate(prompt, past_key_values=cache.copy(), **options)
        assert torch.equal(found, expected)


@torch.no_grad()
def test_a_mask_of_no_past_is_refused_where_a_prompt_is_read_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill, "PIECE", 4)
    with pytest.raises(ValueError, match="of 8 positions where past_key_values is None, got 9"):
        model_of()(tokens(1, 8), attention_mask=torch.ones(1, 9), logits_to_keep=1)
