"""Needles and RULER: exact lengths, answers in the text and there once, published prompts."""

import ast
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vort.lab.tasks import IGNORED, MultiNeedle, Ruler, answers_right
from vort.lab.tasks import ruler as published
from vort.lab.tasks.corpus import Document
from vort.lab.tasks.haystack import Kit, Lines, MadeSentences, book_sentences, hide
from vort.lab.tasks.multi_needle import needle_sample
from vort.lab.tasks.pieces import (
    ByteCoder,
    HuggingFaceCoder,
    Pool,
    made_words,
    weave,
    word_lists,
)
from vort.lab.tasks.question_files import Asked, Questions
from vort.lab.tasks.ruler import (
    GENERATED,
    NIAH,
    RULER,
    SYNTHETIC,
    RulerPrompts,
    ruler_score,
    split_prompt,
)
from vort.lab.tasks.task import stream

TOKENS = ("bytes", "words")


def subword_tokenizer() -> object:
    """Byte-level subwords with a token at the beginning, as many models have; made here."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    inner.train_from_iterator([published._LIST * 2, published.NOISE, *made_words(200)], trainer)
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>")


def spaced_tokenizer() -> object:
    """Subwords that begin every text with a space, as those of sentencepiece do; made here."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    alphabet = [chr(code) for code in range(33, 127)] + ["\n"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    words = published.NOISE.replace(".", "").split()
    inner.train_from_iterator(words, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>")


@pytest.mark.parametrize("make", [subword_tokenizer, spaced_tokenizer])
def test_pieces_are_encoded_as_they_are_in_the_middle_of_a_text(make: Any) -> None:
    coder = HuggingFaceCoder(make())
    pieces = ["The sky is blue.\n", "Here", " we", " go", ".", "\nWhat", " is", "?"]
    found = coder.encode_all(pieces)
    assert [found[i].tolist() for i in range(8)] == [coder.encode(p).tolist() for p in pieces]
    text = "".join(pieces)
    whole = coder.tokenizer(text, add_special_tokens=False)["input_ids"]
    # A text may begin with a space that a piece in the middle does not have.
    rest = len(found.joined()) - len(found[0])
    assert whole[-rest:] == found.joined().tolist()[-rest:]
    assert coder.decode(found.joined()) == text


@pytest.fixture(scope="module")
def subwords() -> HuggingFaceCoder:
    return HuggingFaceCoder(subword_tokenizer())


@pytest.fixture(scope="module")
def kit(subwords: HuggingFaceCoder) -> Kit:
    return Kit(subwords)


def questions(words: int = 40) -> Questions:
    texts = made_words(600)
    documents = [" ".join(texts[i : i + words]) + "." for i in range(0, 400, 2)]
    return Questions(documents, [Asked("who?", (texts[5],), (0, 1)), Asked("what?", ("x",), (2,))])


@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=20), data=st.data())
def test_pieces_of_a_pool_come_out_as_they_went_in(sizes: list[int], data: st.DataObject) -> None:
    pieces = [np.arange(size) + 10 * i for i, size in enumerate(sizes)]
    pool = Pool.of(pieces)
    which = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=10))
    expected = [token for i in which for token in pieces[i].tolist()]
    assert pool.take(np.array(which, dtype=np.int64)).joined().tolist() == expected
    lines = weave(pool, Pool.same(np.array([-1]), len(pool)), pool)
    assert [lines[i].tolist() for i in range(len(pool))] == [
        [*piece.tolist(), -1, *piece.tolist()] for piece in pieces
    ]


@given(count=st.integers(1, 300), seed=st.integers(0, 5))
def test_haystacks_have_the_length_asked_for_and_places_at_sentence_ends(
    count: int, seed: int
) -> None:
    coder = ByteCoder()
    text = b"One. Two three! Four five six? Seven, 1234567 eight. Nine."
    for hay in (
        Lines(coder.encode("No end.\n")),
        MadeSentences(coder),
        book_sentences([Document("a", text)], coder, 1000),
    ):
        tokens, places = hay.cut(np.random.default_rng(seed), count)
        assert len(tokens) == count
        assert places[-1] == count
        assert (np.diff(places) > 0).all()
        said = coder.decode(tokens)
        assert "1234567" not in said
        assert all(said[place - 1] in ".!?\n" for place in places if place > 0)


def test_needles_lie_at_the_sentence_end_nearest_to_their_depth() -> None:
    hay = np.zeros(100, dtype=np.int64), np.arange(0, 101, 10)
    text, places = hide(hay, [np.array([1]), np.array([2, 2]), np.array([3])], [1.0, 0.0, 0.52])
    assert places == [102 + 1, 0, 52]
    assert [int(text[place]) for place in places] == [1, 2, 3]
    assert len(text) == 104


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("asked", ["one", "all"])
def test_needles_are_asked_for_at_the_end_and_stand_in_the_text_once(
    tokens: str, asked: str
) -> None:
    task = MultiNeedle(length=900, needles=3, asked=asked, tokens=tokens)
    for index in range(12):
        row = task.row("test", index)
        assert len(row.tokens) == 900
        assert (row.tokens[row.sources] == row.labels).all()
        assert (row.tokens[row.queries + 1] == row.labels).all()
        assert row.queries[-1] == 898
        sample = task.sample(stream(0, "multi_needle", "test", index), 900, "test", index)
        prompt = task.coder.decode(sample.prompt)
        assert len(sample.expected) == (3 if asked == "all" else 1)
        for answer in sample.expected:
            assert prompt.count(answer) == 1
        text = task.coder.decode(row.tokens)
        assert text.count("The special magic number for") >= 3


def test_depths_of_tests_are_gone_through_in_turn() -> None:
    task = MultiNeedle(length=4096, needles=2, depths=(0.0, 0.5, 1.0))
    batch = task.batch("test", range(6))
    asked = batch["labels"] != IGNORED
    assert batch["buckets"][asked].tolist() == [0, 1, 2, 0, 1, 2]
    where = batch["sources"][asked] / 4096
    assert torch.allclose(where, torch.tensor([0, 0.5, 1.0] * 2), atol=0.02)
    assert task.bucket_names == ("0%", "50%", "100%")


def test_needles_in_training_lie_anywhere() -> None:
    task = MultiNeedle(length=2048)
    batch = task.batch("train", range(200))
    where = batch["sources"][batch["labels"] != IGNORED].float() / 2048
    assert where.min() < 0.05
    assert where.max() > 0.9
    assert abs(where.mean() - 0.5) < 0.08


def test_books_of_a_split_are_the_haystack_of_that_split(tmp_path: Path) -> None:
    for split, word in (("train", "apple"), ("test", "pear")):
        (tmp_path / split).mkdir()
        for number in range(30):
            text = f"A {word} fell on day {number}. " * 40
            (tmp_path / split / f"{number}.txt").write_text(text)
    task = MultiNeedle(length=600, tokens="bytes", source=str(tmp_path))
    said = {
        split: bytes(task.batch(split, [0])["input_ids"][0].tolist()).decode()
        for split in ("train", "test")
    }
    assert "apple" in said["train"]
    assert "pear" not in said["train"]
    assert "pear" in said["test"]
    assert "apple" not in said["test"]
    assert str(tmp_path) not in str(task.describe())


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("kind", SYNTHETIC)
def test_tasks_of_ruler_have_exact_lengths_and_answers_in_the_text(kind: str, tokens: str) -> None:
    for length in (1300, 1301, 4099):
        task = Ruler(kind=kind, length=length, tokens=tokens, words=2048)
        for index in range(2):
            row = task.row("test", index)
            assert len(row.tokens) == length
            assert (row.tokens[row.sources] == row.labels).all()
            assert (row.tokens[row.queries + 1] == row.labels).all()
            assert row.queries[-1] == length - 2
            assert row.labels.max() < task.num_classes
            again = task.row("test", index)
            assert np.array_equal(row.tokens, again.tokens)


@pytest.mark.parametrize("kind", [*NIAH])
@pytest.mark.parametrize("tokens", TOKENS)
def test_values_of_needles_are_in_a_prompt_once(kind: str, tokens: str) -> None:
    prompts = Ruler(kind=kind, tokens=tokens, words=64, value_tokens=1).prompts("test")
    for index in range(5):
        sample = prompts.sample(kind, np.random.default_rng(index), 3000)
        text = prompts.kit.coder.decode(sample.prompt)
        assert len(set(sample.expected)) == len(sample.expected)
        for answer in sample.expected:
            assert text.count(f" {answer}") == 1


@pytest.mark.parametrize("task", RULER)
def test_prompts_have_exact_lengths_in_the_tokens_of_a_model(
    task: str, subwords: HuggingFaceCoder, kit: Kit
) -> None:
    prompts = RulerPrompts(kit, questions={"qa_1": questions(), "qa_2": questions(41)})
    for length in (4096, 5003):
        reserve = GENERATED[task]
        rng = stream(42, task, "test", length)
        sample = prompts.sample(task, rng, length, reserve, index=1)
        assert len(sample.prompt) + reserve == length
        assert sample.prompt[0] == 0
        text = subwords.decode(sample.prompt)
        if not task.startswith("qa"):
            assert all(answer in text for answer in sample.expected)


def test_tokens_of_a_prompt_are_those_of_its_text(subwords: HuggingFaceCoder, kit: Kit) -> None:
    prompts = RulerPrompts(kit)
    for task in ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "fwe"):
        sample = prompts.sample(task, np.random.default_rng(0), 4096, GENERATED[task])
        text = subwords.decode(sample.prompt)
        whole = subwords.tokenizer(text)["input_ids"]
        # Where the haystack was cut, a word may begin in the middle.
        assert abs(len(whole) - len(sample.prompt)) <= 3
        assert whole[-3000:] == sample.prompt[-3000:].tolist()


def test_common_words_come_thirty_times_and_others_three() -> None:
    sample = RulerPrompts(Kit(ByteCoder())).sample("cwe", np.random.default_rng(0), 20_000, 120)
    text = ByteCoder().decode(sample.prompt)
    listed = text.split("\n")[1].split()
    counts = Counter(listed[1::2])
    assert {word for word, count in counts.items() if count == 30} == set(sample.expected)
    assert {*counts.values()} == {30, 3}
    assert listed[0::2] == [f"{i}." for i in range(1, len(listed) // 2 + 1)]


def test_frequent_words_follow_zipf() -> None:
    sample = RulerPrompts(Kit(ByteCoder())).sample("fwe", np.random.default_rng(0), 40_000, 50)
    text = ByteCoder().decode(sample.prompt).removeprefix(published._CODED).split("\nQuestion")[0]
    counts = Counter(text.split())
    top = [word for word, _ in counts.most_common(4)]
    assert top[0] == "..."
    assert top[1:] == list(sample.expected)
    assert abs(counts[top[1]] / counts[top[3]] - 4.0) < 0.05


@pytest.mark.parametrize("tokens", TOKENS)
def test_frequent_words_are_three_answers_wherever_they_stand(tokens: str) -> None:
    """Two that stood side by side in the text would count as one."""
    task = Ruler(kind="fwe", length=1024, tokens=tokens, test_sequences=200)  # type: ignore[arg-type]
    batch = task.batch("test", range(200))
    found = answers_right(batch, batch["labels"])
    assert found[:, 0].bincount().tolist() == [3] * 200
    asked = batch["labels"] != IGNORED
    rows = asked.nonzero(as_tuple=True)[0]
    sources = batch["sources"][asked].long()
    assert torch.equal(batch["input_ids"][rows, sources], batch["labels"][asked])


def test_first_places_are_taken_that_do_not_touch() -> None:
    places = [np.array(each) for each in ([3, 8, 9], [4, 6], [5, 20])]
    assert published._apart(places) == [3, 6, 5]
    assert published._apart([np.array([2, 7]), np.array([3]), np.array([9])]) == [7, 3, 9]
    assert published._apart([np.array([2]), np.array([3]), np.array([4])]) == [2, 3, 4]


def test_variables_of_a_chain_are_defined_one_by_the_other() -> None:
    sample = RulerPrompts(Kit(ByteCoder())).sample("vt", np.random.default_rng(0), 8000, 30)
    text = ByteCoder().decode(sample.prompt)
    own = text.rsplit("Memorize and track", 1)[1]
    names = sample.expected
    assert len(names) == 5
    places = [own.index(f"VAR {names[0]} = ")]
    for former, name in pairwise(names):
        places.append(own.index(f"VAR {name} = VAR {former} "))
    assert places == sorted(places)
    # The worked example before it has other names.
    assert text.count("they are:") == 2


def test_gold_documents_are_always_there_and_all_are_numbered(subwords: HuggingFaceCoder) -> None:
    found = questions()
    prompts = RulerPrompts(Kit(subwords), questions={"qa_2": found})
    sample = prompts.sample("qa_2", np.random.default_rng(0), 4096, 32, index=0)
    text = subwords.decode(sample.prompt)
    for number in found.asked[0].gold:
        assert found.documents[number] in text
    count = text.count("Document ")
    assert all(f"Document {i}:\n" in text for i in range(1, count + 1))
    with pytest.raises(ValueError, match="its documents do not fit"):
        prompts.sample("qa_2", np.random.default_rng(0), 240, 32, index=0)
    with pytest.raises(ValueError, match="too few documents"):
        prompts.sample("qa_2", np.random.default_rng(0), 10**6, 32, index=0)
    with pytest.raises(ValueError, match="needs a file of questions"):
        prompts.sample("qa_1", np.random.default_rng(0), 4096, 32)


def test_documents_end_with_an_empty_line_the_one_that_is_cut_too() -> None:
    prompts = RulerPrompts(Kit(ByteCoder()), questions={"qa_1": questions()})
    for length in range(4000, 4040, 3):
        rng = np.random.default_rng(length)
        sample = prompts.sample("qa_1", rng, length, 32, index=0)
        assert len(sample.prompt) == length - 32
        text = ByteCoder().decode(sample.prompt)
        titles = text.split("Document ")[1:]
        assert all(one.endswith("\n\n") for one in titles[:-1])
        assert [one.split(":")[0] for one in titles] == [f"{i + 1}" for i in range(len(titles))]


def words_without_lines() -> object:
    """Lower case, no ends of lines, spaces around marks: a tokenizer that keeps little."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=900, special_tokens=["[UNK]"], show_progress=False
    )
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    every = [f"{a}{b} {b}" for a in letters for b in letters]
    inner.train_from_iterator(
        [*every, published._LIST, published.NOISE, ": = ( ) ? , ' -"], trainer
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")


@pytest.mark.parametrize("task", RULER)
def test_lengths_are_exact_where_a_tokenizer_has_no_ends_of_lines(task: str) -> None:
    coder = HuggingFaceCoder(words_without_lines())
    assert not len(coder.encode("\n"))
    prompts = RulerPrompts(Kit(coder), questions={"qa_1": questions(), "qa_2": questions(41)})
    for length in (4096, 5003):
        rng = stream(42, task, "test", length)
        sample = prompts.sample(task, rng, length, GENERATED[task], index=1)
        assert len(sample.prompt) + GENERATED[task] == length
        read, begins = split_prompt(task, coder.decode(sample.prompt))
        assert begins.startswith("the special magic" if task in NIAH else "answer")
        assert len(begins) < 600 < len(read)


def test_a_prompt_that_a_tokenizer_does_not_give_back_is_said() -> None:
    with pytest.raises(ValueError, match="does not give back the prompt of vt"):
        split_prompt("vt", "nothing of it")


def test_words_that_are_too_few_are_called_by_their_setting() -> None:
    task = Ruler(kind="fwe", length=4096, few_keys=32)
    with pytest.raises(ValueError, match="few_keys must allow for more than"):
        task.batch("test", [0])
    with pytest.raises(ValueError, match=r"^words must allow for more than"):
        Ruler(kind="fwe", length=8192, words=64).batch("test", [0])


def test_mixed_lengths_fill_training_sequences_only() -> None:
    task = MultiNeedle(length=1024, mixed=(256, 512, 1024))
    asked = {
        split: (task.batch(split, range(40))["labels"] != IGNORED).sum(1).tolist()
        for split in ("train", "test")
    }
    assert set(asked["train"]) == {1, 2, 4}
    assert set(asked["test"]) == {1}
    with pytest.raises(ValueError, match="mixed must divide length = 1024, got 300"):
        MultiNeedle(length=1024, mixed=(300,))


def test_samples_apart_are_rows_of_one_length_that_know_nothing_of_each_other() -> None:
    settings: dict[str, Any] = {"mixed": (256, 512, 1024), "needles": 2, "asked": "all"}
    task = MultiNeedle(length=1024, apart=2, **settings)
    shapes = set()
    for first in range(0, 24, 2):
        batch = task.batch("train", [first, first + 1])
        rows, length = batch["input_ids"].shape
        assert rows * length == 2 * 1024
        shapes.add(length)
        row, place = (batch["labels"] != IGNORED).nonzero(as_tuple=True)
        assert row.bincount().tolist() == [2] * rows
        # The answer stands in the row that asks for it, before it does.
        source = batch["sources"][row, place].long()
        assert (source < place).all()
        assert torch.equal(batch["input_ids"][row, source], batch["labels"][row, place])
    assert shapes == {256, 512, 1024}
    again = task.batch("train", [4, 5])["input_ids"]
    assert torch.equal(task.batch("train", [5])["input_ids"], again[len(again) // 2 :])
    assert task.batch("test", range(3))["input_ids"].shape == (3, 1024)
    mixed = next(n for n in range(2, 40, 2) if len({_length(task, n - 1), _length(task, n)}) > 1)
    with pytest.raises(ValueError, match="apart must be the size of a batch, or a multiple"):
        task.batch("train", [mixed - 1, mixed])
    with pytest.raises(ValueError, match="apart must be at least 1"):
        MultiNeedle(length=1024, apart=0)


def test_the_first_training_sequences_can_be_of_the_shortest_texts() -> None:
    settings: dict[str, Any] = {"mixed": (256, 512, 1024), "apart": 2}
    task = MultiNeedle(length=1024, short_first=12, **settings)
    assert {_length(task, index) for index in range(12)} == {256}
    assert {_length(task, index) for index in range(12, 40)} == {256, 512, 1024}
    packed = MultiNeedle(length=1024, short_first=12, mixed=(256, 1024))
    assert ((packed.batch("train", range(12))["labels"] != IGNORED).sum(1) == 4).all()
    with pytest.raises(ValueError, match="short_first must be a multiple of apart = 2, got 3"):
        MultiNeedle(length=1024, short_first=3, **settings)


def test_a_table_of_sentences_is_what_pieces_make() -> None:
    task = MultiNeedle(words=64)
    fast, slow = MadeSentences(task.coder), MadeSentences(task.coder)
    assert fast.even
    assert not MadeSentences(ByteCoder()).even
    slow.even = False
    for count in (1, 7, 8, 9, 100, 1001):
        ours, theirs = (each.cut(np.random.default_rng(count), count) for each in (fast, slow))
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _length(task: MultiNeedle, index: int) -> int:
    return task.batch("train", [index])["input_ids"].shape[1]


def test_all_tasks_of_ruler_together_are_told_apart_by_bucket() -> None:
    task = Ruler(kind="all", length=1024, words=512)
    assert task.bucket_names == SYNTHETIC
    for index in range(11):
        alone = Ruler(kind=SYNTHETIC[index], length=1024, words=512)
        batch, own = task.batch("test", [index]), alone.batch("test", [index])
        asked = batch["labels"] != IGNORED
        assert set(batch["buckets"][asked].tolist()) == {index}
        assert int(asked.sum()) == int((own["labels"] != IGNORED).sum())
    seen = task.batch("train", range(60))["buckets"]
    assert set(seen[seen >= 0].tolist()) == set(range(11))


@pytest.mark.parametrize("kind", SYNTHETIC)
def test_keys_and_numbers_of_ruler_can_be_few(kind: str) -> None:
    """Each is met more often in training; lists of common words have all words still."""
    task = Ruler(kind=kind, length=1024, few_keys=32, few_numbers=16)  # type: ignore[arg-type]
    batch = task.batch("train", range(12))
    first = task.coder.values  # type: ignore[attr-defined]
    answers = batch["labels"][batch["labels"] != IGNORED]
    words = kind in ("vt", "cwe", "fwe")
    assert (answers >= (first if words else 0)).all()
    if kind != "cwe":
        assert (answers < (first + 32 if words else 16)).all()
    else:
        assert (answers >= first + 32).any()
    with pytest.raises(ValueError, match="few_keys must be at least 16, or None, got 2"):
        Ruler(few_keys=2)


def test_answers_are_right_only_as_a_whole() -> None:
    task = MultiNeedle(length=700, needles=2, asked="all", tokens="bytes", depths=(0.0, 1.0))
    batch = task.batch("test", [0, 1])
    perfect = batch["labels"].clone()
    found = answers_right(batch, perfect)
    assert found[:, 2].tolist() == [1, 1, 1, 1]
    assert found[:, 0].tolist() == [0, 0, 1, 1]
    assert sorted(found[:2, 1].tolist()) == [0, 1]
    asked = (batch["labels"][0] != IGNORED).nonzero().flatten()
    perfect[0, asked[-1]] += 1
    assert answers_right(batch, perfect)[:, 2].tolist() == [1, 0, 1, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"needles": 0}, "needles must be at least 1"),
        ({"asked": "none"}, "asked must be one of one, all"),
        ({"depths": (0.5, 0.1)}, "depths must lie in"),
        ({"tokens": "letters"}, "tokens must be one of bytes, words"),
        ({"source": "books"}, "source must be absent with tokens='words'"),
        ({"words": 3}, "words must be at least 64"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiNeedle(**settings)


def test_a_length_too_short_says_how_long_it_must_be() -> None:
    with pytest.raises(ValueError, match=r"length must be at least \d+ for this, got 10"):
        MultiNeedle(length=10).batch("test", [0])
    with pytest.raises(ValueError, match=r"length must be at least \d+ for this task, got 20"):
        Ruler(length=20).batch("test", [0])


def _literals(path: Path) -> set[str]:
    """All texts in a source, whole ones."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def test_words_of_the_prompts_are_those_of_lm_eval() -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    folder = Path(lm_eval.__file__).parent / "tasks" / "ruler"
    texts = {text for path in folder.glob("*.py") for text in _literals(path)}
    kinds = {"type_needle_v": "numbers", "context": "TEXT", "query": "KEY"}
    (needle,) = {t for t in texts if t.startswith("Some special magic") and "{query}" in t}
    many = published._HIDDEN[True].format("numbers", "numbers") + "TEXT\n"
    many += published._ASKED[True].format("numbers") + f" KEY{published._MENTIONED}?"
    assert needle.format(**kinds) == many
    one = needle.replace("Some", "A").replace("are all", "is").replace("are", "is")
    few = published._HIDDEN[False].format("number", "number") + "TEXT\n"
    few += published._ASKED[False].format("number") + f" KEY{published._MENTIONED}?"
    assert one.format(**{**kinds, "type_needle_v": "number"}) == few
    assert published._NEEDLE.format("numbers") + " K is: V." in {
        text.format(type_needle_v="numbers", key="K", value="V")
        for text in texts
        if text.startswith("One of the special magic")
    }
    assert published.NOISE in texts
    assert published._LIST + "{context}" + published._COMMON.split("\n\n")[0] in texts
    assert " " + published._COMMON.split("\n\n")[1] in texts
    question, answer = published._FREQUENT.split(" Answer")
    assert f"{published._CODED} {{context}}{question}" in texts
    assert f" Answer{answer}" in texts
    track = published._TRACK + "{context}" + "{query}".join(f"{part}" for part in published._FIND)
    assert track.replace(" value{query}", " value {query}") in texts
    found = published._FOUND
    assert f"{found[0]}{{num_v}}{found[1]} {{query}}{found[2]} " in texts
    asks = f"{published._DOCUMENTS}{{context}}\n\n{published._INSTRUCTION}Question: {{query}}"
    assert asks in texts


def test_scores_are_those_of_lm_eval() -> None:
    utils = pytest.importorskip("lm_eval.tasks.ruler.common_utils", reason="no lm_eval")
    for said, expected in (
        ("The answers are 12, 34 and 56.", ["12", "34", "78", "90"]),
        ("nothing", ["12"]),
        ("ABC def", ["abc", "DEF"]),
    ):
        assert ruler_score("vt", said, expected) == utils.string_match_all([said], [expected])


def test_words_are_those_of_wonderwords_where_it_is_installed() -> None:
    pytest.importorskip("wonderwords", reason="wonderwords is not installed")
    source, lists = word_lists()
    assert source.startswith("wonderwords ")
    assert "happy" in lists["adjective"]
    assert Kit(ByteCoder(), real_words=True).source == source


@pytest.mark.parametrize("kind", ["words", "numbers", "uuids"])
def test_the_shortest_of_a_kind_is_no_longer_than_any(kind: str, kit: Kit) -> None:
    for each in (kit, Kit(ByteCoder()), Ruler().prompts("test").kit):
        rng = np.random.default_rng(0)
        drawn = each.keys(rng, 200) if kind == "words" else each.values(rng, kind, 200, 5)
        assert 0 < each.shortest(kind) <= drawn.lengths.min()


def test_made_words_differ_and_none_is_in_another() -> None:
    words = made_words(20_000)
    assert len(set(words)) == 20_000
    assert {len(word) for word in words} == {6}


def test_a_needle_sample_reserves_what_a_model_may_write() -> None:
    kit, rng = Kit(ByteCoder()), np.random.default_rng(0)
    hay = MadeSentences(kit.coder)
    sample = needle_sample(
        kit, hay, rng, 1000, needles=4, asked="all", depths=[0, 0.3, 0.6, 1], reserve=128
    )
    assert len(sample.prompt) == 872
    text = kit.coder.decode(sample.prompt)
    assert text.endswith(" mentioned in the text are")
    assert len(sample.expected) == 4


def test_training_begins_with_fewer_needles_and_fewer_numbers() -> None:
    task = MultiNeedle(length=200, needles=4, needles_from=1, asked="all", words=64, values=16)
    labels = task.batch("train", range(60))["labels"]
    counts = (labels >= 0).sum(1)
    assert set(counts.tolist()) == {1, 2, 3, 4}
    assert task.num_classes == 16
    assert int(labels.max()) < 16
    assert ((task.batch("test", range(8))["labels"] >= 0).sum(1) == 4).all()
    with pytest.raises(ValueError, match=r"needles_from must lie in \[1, 4\]"):
        MultiNeedle(length=200, needles=4, needles_from=5)
    with pytest.raises(ValueError, match=r"values must lie in \[1, 1000\]"):
        MultiNeedle(length=200, values=2000)
