"""Memories that add up: aged, merged and taken apart, against reading the texts in a row."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from vort.models import VortCache, VortConfig, VortForCausalLM, VortSession

# Nothing that reaches over the border between two texts but the memory.
BARE: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "horizon": 512, "conv_size": 0, "use_entropy": False, "sliding_window": 8,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
MEMORIES = ["vort", "mixture", "exponential", "uniform_power_law", "linear"]


# The second of two rows of 24 begins with ten of padding.
PADDED = torch.ones(2, 24, dtype=torch.long)
PADDED[1, :10] = 0


def model(**options: Any) -> VortForCausalLM:
    torch.manual_seed(0)
    return VortForCausalLM(VortConfig(**{**BARE, **options})).eval()


def texts(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(32, (2, n), generator=generator) for n in lengths]


@torch.no_grad()
def read(
    subject: VortForCausalLM, ids: torch.Tensor, mask: torch.Tensor | None = None, **options: Any
) -> VortCache:
    cache = subject.new_cache(**options)
    subject(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    return cache


@torch.no_grad()
def logits_after(
    subject: VortForCausalLM, cache: VortCache, question: torch.Tensor
) -> torch.Tensor:
    return subject(question, past_key_values=cache.copy(), use_cache=True).logits


@pytest.mark.parametrize("normalizer", ["decayed", "undecayed", "none"])
@pytest.mark.parametrize("memory", MEMORIES)
def test_in_one_layer_merged_is_read_in_a_row(memory: str, normalizer: str) -> None:
    subject = model(memory=memory, normalizer=normalizer)
    *documents, question = texts(40, 25, 70, 9)
    merged = VortCache.merged([read(subject, ids) for ids in documents], subject)
    row = read(subject, torch.cat(documents, 1))
    assert merged.seen() == row.seen() == 135
    for name in ("memory.G", "memory.b"):
        if name in row.states[0]:
            torch.testing.assert_close(
                merged.states[0][name], row.states[0][name], rtol=1e-5, atol=1e-6
            )
    torch.testing.assert_close(
        logits_after(subject, merged, question), logits_after(subject, row, question),
        rtol=1e-5, atol=1e-5,
    )  # fmt: skip


def test_a_text_can_be_taken_out_again() -> None:
    subject = model()
    first, second, third = texts(40, 25, 70)
    parts = [read(subject, ids) for ids in (first, second, third)]
    merged = VortCache.merged(parts, subject)
    left = merged.without(parts[1], subject, ago=70)
    wanted = VortCache.merged([parts[0], parts[2]], subject, ages=[95, 0])
    for name in ("memory.G", "memory.b"):
        torch.testing.assert_close(
            left.states[0][name], wanted.states[0][name], rtol=1e-4, atol=1e-5
        )
    assert left.seen() == 110
    # What is merged from stays as it was.
    assert torch.equal(parts[1].states[0]["memory.G"], read(subject, second).states[0]["memory.G"])


def test_ages_are_of_each_row_and_add_up() -> None:
    subject = model()
    cache = read(subject, texts(30)[0])
    twice = cache.aged(7, subject).aged(torch.tensor([3, 5]), subject)
    for row, steps in enumerate((10, 12)):
        once = cache.aged(steps, subject).states[0]["memory.G"][row]
        torch.testing.assert_close(twice.states[0]["memory.G"][row], once, rtol=1e-5, atol=1e-7)
    assert torch.equal(cache.aged(0, subject).states[0]["memory.G"], cache.states[0]["memory.G"])
    # A slow scale keeps more than a fast one, and the window is not the memory's.
    kept = cache.aged(50, subject).states[0]["memory.G"].abs().sum((0, 1, 3, 4))
    share = kept / cache.states[0]["memory.G"].abs().sum((0, 1, 3, 4))
    assert bool((share.diff() <= 0).all())
    assert torch.equal(cache.aged(50, subject).states[0]["local.k"], cache.states[0]["local.k"])


@pytest.mark.parametrize("window", [8, 0])
def test_what_was_merged_is_as_long_as_its_texts(window: int) -> None:
    subject = model(sliding_window=window)
    first, second, third = (read(subject, ids) for ids in texts(40, 25, 70))
    nested = VortCache.merged([first, VortCache.merged([second, third], subject)], subject)
    flat = VortCache.merged([first, second, third], subject)
    assert nested.seen() == flat.seen() == 135
    torch.testing.assert_close(
        nested.states[0]["memory.G"], flat.states[0]["memory.G"], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("windows", [[8], [0, 8]])
def test_rows_of_padded_batches_are_as_old_as_they_have_seen(windows: list[int]) -> None:
    own = [{"sliding_window": window} for window in windows]
    subject = model(num_hidden_layers=len(windows), layer_settings=own)
    first, second = texts(30, 24)
    part = read(subject, second, PADDED)
    merged = VortCache.merged([read(subject, first), part], subject)
    for row, ids in enumerate((second[0], second[1, 10:])):
        alone = read(subject, torch.cat([first[row], ids])[None])
        torch.testing.assert_close(
            merged.states[0]["memory.G"][row], alone.states[0]["memory.G"][0], rtol=1e-5, atol=1e-6
        )


def test_padded_rows_that_no_window_counts_need_ages() -> None:
    subject = model(sliding_window=0)
    first, second = texts(30, 24)
    part = read(subject, second, PADDED)
    parts = [read(subject, first), part.copy()]
    with pytest.raises(ValueError, match="ages must be given for padded rows"):
        VortCache.merged(parts, subject)
    merged = VortCache.merged(parts, subject, ages=[torch.tensor([24, 14]), 0])
    alone = read(subject, torch.cat([first[1], second[1, 10:]])[None])
    torch.testing.assert_close(
        merged.states[0]["memory.G"][1], alone.states[0]["memory.G"][0], rtol=1e-5, atol=1e-6
    )
    part.reset()
    assert not part.padded


def test_padded_rows_that_were_merged_need_ages_to_be_merged_again() -> None:
    """The window of a sum is the last text's, and has counted that one alone."""
    subject = model()
    first, second, third = texts(30, 24, 12)
    parts = [read(subject, first), read(subject, second, PADDED), read(subject, third)]
    flat = VortCache.merged(parts, subject)
    inner = VortCache.merged(parts[1:], subject)
    for cache in (
        inner,
        inner.copy(),
        inner.select(torch.tensor([1, 0])),
        inner.without(parts[2], subject),
    ):
        with pytest.raises(ValueError, match="padded rows that were merged before"):
            VortCache.merged([parts[0], cache], subject)
    nested = VortCache.merged([parts[0], inner], subject, ages=[torch.tensor([36, 26]), 0])
    torch.testing.assert_close(
        nested.states[0]["memory.G"], flat.states[0]["memory.G"], rtol=1e-5, atol=1e-6
    )
    inner.reset()
    assert not inner.uncounted


def test_what_compiled_steps_have_counted_is_counted_once() -> None:
    subject = model()
    first, second = texts(40, 25)
    static = read(subject, second, static=True)
    static.positions[0] -= 5
    static.compiled[0] += 5
    first_part = read(subject, first)
    merged = VortCache.merged([first_part, static], subject)
    assert merged.seen() == 65
    assert merged.without(first_part, subject, ago=25).seen() == 25
    assert static.seen() == 25


def test_deeper_models_differ_and_stay_finite() -> None:
    subject = model(num_hidden_layers=3, conv_size=4, use_entropy=True)
    *documents, question = texts(60, 60, 9)
    merged = VortCache.merged([read(subject, ids) for ids in documents], subject)
    row = read(subject, torch.cat(documents, 1))
    found, wanted = (logits_after(subject, cache, question) for cache in (merged, row))
    assert bool(found.isfinite().all())
    assert 0 < float((found - wanted).abs().max()) < 1


def test_half_precision_states_stay_so() -> None:
    subject = model()
    parts = [read(subject, ids, state_dtype=torch.bfloat16) for ids in texts(30, 20)]
    merged = VortCache.merged(parts, subject)
    assert merged.states[0]["memory.G"].dtype == torch.bfloat16
    assert logits_after(subject, merged, texts(5)[0]).isfinite().all()


@pytest.mark.parametrize("memory", ["gla", "softmax"])
def test_memories_without_constant_decays_are_refused(memory: str) -> None:
    subject = model(memory=memory)
    cache = read(subject, texts(20)[0])
    with pytest.raises(TypeError, match="constant decays"):
        VortCache.merged([cache, cache], subject)


def test_what_cannot_be_merged_is_refused() -> None:
    subject = model()
    cache = read(subject, texts(20)[0])
    with pytest.raises(ValueError, match="at least one"):
        VortCache.merged([], subject)
    with pytest.raises(ValueError, match="seen nothing"):
        VortCache.merged([subject.new_cache(), cache], subject)
    with pytest.raises(ValueError, match="one for each of 2"):
        VortCache.merged([cache, cache], subject, ages=[1])
    with pytest.raises(ValueError, match="one batch size"):
        VortCache.merged([cache, cache.select(torch.tensor([0]))], subject)
    one = cache.select(torch.tensor([0]))
    for some, other in ((cache, one), (one, cache)):
        with pytest.raises(ValueError, match="one batch size"):
            some.without(other, subject)
    odd: list[Any] = [-1, float("nan"), float("inf"), torch.tensor([1.0, float("nan")])]
    for steps in (*odd, 10**30, "3", None):
        with pytest.raises(ValueError, match="steps must be 0 or more and finite"):
            cache.aged(steps, subject)
        with pytest.raises(ValueError, match="ages must be 0 or more and finite"):
            VortCache.merged([cache, cache], subject, ages=[steps, 0])
        with pytest.raises(ValueError, match="ago must be 0 or more and finite"):
            cache.without(cache, subject, ago=steps)
    for options in ({"hidden_size": 64}, {"num_attention_heads": 4}, {"normalizer": "none"}):
        strange = read(model(**options), texts(20)[0])
        for caches in ([strange, cache], [cache, strange]):
            with pytest.raises(
                ValueError, match="memories must be of the model given: its layer 0"
            ):
                VortCache.merged(caches, subject)
    with pytest.raises(ValueError, match="layers"):
        read(model(num_hidden_layers=2), texts(20)[0]).aged(1, subject)


@pytest.mark.parametrize("memory", ["vort", "gla", "gated_delta", "softmax", "none"])
def test_texts_read_side_by_side_leave_what_each_leaves_alone(memory: str) -> None:
    subject = model(memory=memory, num_hidden_layers=2, conv_size=4, sliding_window=5)
    documents = [ids[0] for ids in texts(40, 8, 70, 64, 1, 16)]
    found = VortSession.read_apart(subject, [*documents, []], rows=3, chunk_size=8)
    assert [session.tokens_seen for session in found] == [40, 8, 70, 64, 1, 16, 0]
    for session, ids in zip(found, documents, strict=False):
        alone = VortSession(subject, chunk_size=8)
        alone.feed(ids)
        torch.testing.assert_close(session.logits, alone.logits, rtol=1e-4, atol=1e-5)
        more = torch.tensor([3, 1, 4, 1, 5])
        session.feed(more)
        alone.feed(more)
        torch.testing.assert_close(session.logits, alone.logits, rtol=1e-4, atol=1e-5)
        assert session._cache.get_seq_length() == alone._cache.get_seq_length()
    found[-1].feed(documents[0])  # one that has read nothing is a session like any other


def test_texts_read_side_by_side_may_be_saved_and_merged(tmp_path: Path) -> None:
    subject = model()
    documents = [ids[0] for ids in texts(12, 30)]
    found = VortSession.read_apart(subject, documents)
    found[0].save(tmp_path / "first.safetensors")
    first = VortSession.load(tmp_path / "first.safetensors", subject)
    assert torch.equal(first.logits, found[0].logits)
    merged, row = VortSession.merged([first, found[1]]), VortSession(subject)
    row.feed(torch.cat(documents))
    for session in (merged, row):
        session.feed(torch.tensor([1, 2, 3]))
    torch.testing.assert_close(merged.logits, row.logits, rtol=1e-5, atol=1e-5)


def test_texts_that_cannot_be_read_side_by_side_are_refused() -> None:
    subject = model()
    with pytest.raises(TypeError, match="several, got one"):
        VortSession.read_apart(subject, "a text")
    with pytest.raises(ValueError, match="rows must be a whole number >= 1"):
        VortSession.read_apart(subject, [[1]], rows=0)
    with pytest.raises(ValueError, match=r"0\.\.31, got 32 at 1"):
        VortSession.read_apart(subject, [[1], [1, 32]])
    assert VortSession.read_apart(subject, []) == []


def test_sessions_merge_save_and_go_on(tmp_path: Path) -> None:
    subject = model()
    documents = [ids[0] for ids in texts(40, 25, 70)]
    sessions = []
    for ids in documents:
        sessions.append(VortSession(subject))
        sessions[-1].feed(ids)
    merged = VortSession.merged(sessions)
    assert merged.tokens_seen == 135
    with pytest.raises(ValueError, match="since its memory was changed"):
        next(merged.generate(1))
    merged.save(tmp_path / "merged.safetensors")
    merged = VortSession.load(tmp_path / "merged.safetensors", subject)
    row = VortSession(subject)
    row.feed(torch.cat(documents))
    question = torch.tensor([1, 2, 3])
    merged.feed(question)
    row.feed(question)
    torch.testing.assert_close(merged.logits, row.logits, rtol=1e-5, atol=1e-5)
    left = merged.without(sessions[2], ago=3)
    assert left.tokens_seen == 68
    older = row.aged(100)
    assert older.tokens_seen == row.tokens_seen
    with pytest.raises(ValueError, match="one model"):
        VortSession.merged([merged, _of_another_model()])


@pytest.mark.parametrize("bare", [0, 1])
def test_a_layer_that_keeps_nothing_has_nothing_to_add(bare: int) -> None:
    kinds, windows = ["vort", "vort"], [{}, {}]  # type: list[str], list[dict[str, int]]
    kinds[bare], windows[bare] = "none", {"sliding_window": 0}
    subject = model(num_hidden_layers=2, layer_memories=kinds, layer_settings=windows)
    first, second = (read(subject, ids) for ids in texts(20, 30))
    merged = VortCache.merged([first, second], subject)
    left = merged.without(first, subject, ago=30)
    memory = "memory.G"
    held = left.states[1 - bare][memory]
    torch.testing.assert_close(held, second.states[1 - bare][memory], rtol=1e-5, atol=1e-5)
    assert left.aged(3, subject).seen() == 30


def test_sessions_that_lost_a_text_are_saved_and_go_on(tmp_path: Path) -> None:
    """Their window is that of the last text still, and has counted more than is left."""
    subject = model()
    short, long = VortSession(subject), VortSession(subject)
    short.feed(texts(10)[0][0])
    long.feed(texts(100)[0][0])
    left = VortSession.merged([short, long]).without(long)
    nothing = short.without(short)
    fed = left.branch()
    fed.feed([1, 2, 3])
    for session, seen in ((left, 10), (nothing, 0), (fed, 13)):
        session.save(tmp_path / "left.safetensors")
        again = VortSession.load(tmp_path / "left.safetensors", subject)
        assert again.tokens_seen == session.tokens_seen == seen
        for each in (session, again):
            each.feed([4, 5])
        assert torch.equal(again.logits, session.logits)


def _of_another_model() -> VortSession:
    other = VortSession(model())
    other.feed(torch.tensor([1]))
    return other
