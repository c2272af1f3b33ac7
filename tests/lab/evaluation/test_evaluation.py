"""Suites on any causal model: prompts in pieces, results that go on, answers right as a whole."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from tests.lab.tasks.test_haystack import subword_tokenizer
from tests.models.cases import model_of
from vort.cli import app
from vort.lab.evaluation import (
    NeedleSuite,
    RulerSuite,
    exact_matches,
    read_records,
    run_suite,
    write,
    write_prompts,
)
from vort.lab.evaluation.suite import Job
from vort.lab.tasks import MultiNeedle
from vort.lab.tasks.corpus import Document
from vort.lab.tasks.haystack import Kit, book_sentences
from vort.lab.tasks.pieces import ByteCoder, HuggingFaceCoder
from vort.lab.tasks.question_files import Asked, Questions
from vort.models import ByteTokenizer


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=4096,
    )
    return LlamaForCausalLM(config).eval()


class Reader(nn.Module):
    """A model that reads the text it is shown and knows one kind of answer: all it should say."""

    def __init__(self, suite: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.config = SimpleNamespace()
        self.answers = {}
        for task in suite.tasks:
            for length in (1500, 1700):
                for index in range(3):
                    sample = suite.sample(Job(task, length, index))
                    text = bytes(sample.prompt.tolist())
                    self.answers[text] = " ".join(sample.expected).encode()
        self.calls = 0

    def forward(self, input_ids: Any, past_key_values: Any = None, use_cache: bool = True) -> Any:
        self.calls += 1
        read = (past_key_values or b"") + bytes(input_ids[0].tolist())
        logits = torch.zeros(1, 1, 259)
        for prompt, answer in self.answers.items():
            if read.startswith(prompt):
                place = len(read) - len(prompt)
                logits[0, 0, answer[place] if place < len(answer) else 258] = 1
        return SimpleNamespace(logits=logits, past_key_values=read)


@pytest.mark.parametrize("make", [llama, lambda: model_of(vocab_size=259).eval()])
def test_a_prompt_in_pieces_is_continued_as_one_read_at_once(make: Any) -> None:
    model = make()
    prompt = torch.randint(256, (70,), generator=torch.Generator().manual_seed(1)).numpy()
    whole = write(model, prompt, 8, piece=1000)
    assert write(model, prompt, 8, piece=16) == whole
    assert write(model, prompt, 8, piece=69) == whole
    by_itself = model.generate(
        torch.from_numpy(prompt)[None], max_new_tokens=8, do_sample=False, eos_token_id=-1
    )
    assert by_itself[0, 70:].tolist() == whole
    assert write(model, prompt, 8, stop=[whole[3]])[:4] == whole[: whole.index(whole[3])]


def test_a_model_without_positions_left_says_so() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=259, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    with pytest.raises(ValueError, match="no position for so many tokens, 32 by its config"):
        write(GPT2LMHeadModel(config).eval(), np.zeros(60, dtype=np.int64), 4, piece=16)


def test_a_table_of_positions_that_is_too_short_says_so_and_other_errors_are_their_own() -> None:
    from transformers import BertConfig, BertLMHeadModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=259, max_position_embeddings=32, intermediate_size=16, **sizes)
    with pytest.raises(ValueError, match="no position for so many tokens, 32 by its config"):
        write(BertLMHeadModel(config).eval(), np.zeros(60, dtype=np.int64), 4)


def test_tokens_that_a_model_does_not_have_are_told_apart_from_positions() -> None:
    with pytest.raises(ValueError, match="the model has 32 tokens and the prompt token 200"):
        write(model_of(vocab_size=32).eval(), np.array([3, 200]), 4)


def test_a_model_without_past_reads_every_token_and_writes_the_likeliest() -> None:
    """Token 0 is no padding, and what a model would rather have of `generate` is not asked for."""
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    ends = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": 3}
    model = MambaForCausalLM(MambaConfig(vocab_size=50, **sizes, **ends)).eval()
    with torch.no_grad():  # so that every token matters
        for weight in model.parameters():
            weight += 0.2 * torch.randn_like(weight)
    prompt = torch.randint(50, (40,), generator=torch.Generator().manual_seed(1))
    prompt[::3] = 0
    read, expected = prompt[None], []
    for _ in range(8):
        with torch.no_grad():
            expected.append(int(model(read).logits[0, -1].argmax()))
        read = torch.cat([read, torch.tensor([[expected[-1]]])], 1)
    assert write(model, prompt.numpy(), 8) == expected
    own = model.generation_config
    own.repetition_penalty, own.num_beams, own.do_sample = 5.0, 3, True
    assert write(model, prompt.numpy(), 8) == expected
    assert model.generation_config is own
    assert (
        write(model, prompt.numpy(), 8, stop=[expected[2]])
        == expected[: expected.index(expected[2])]
    )


def test_a_model_that_finds_everything_scores_all_and_only_what_is_missing_is_done(
    tmp_path: Path,
) -> None:
    suite = NeedleSuite(Kit(ByteCoder()), needles=2)
    model = Reader(suite)
    options: dict[str, Any] = {"lengths": [1500, 1700], "stop": [258]}
    found = run_suite(model, suite, tmp_path, samples=2, **options)
    assert found["average"] == {"1500": 1.0, "1700": 1.0}
    assert found["scores"]["all"]["1700"]["samples"] == 2
    calls = model.calls
    run_suite(model, suite, tmp_path, samples=2, **options)
    assert model.calls == calls
    seen = []
    watch = lambda number, total, record: seen.append((number, total, record["index"]))  # noqa: E731
    found = run_suite(model, suite, tmp_path, samples=3, watch=watch, **options)
    assert [index for _, _, index in seen] == [2, 2, 2, 2]
    assert {total for _, total, _ in seen} == {12}
    settings, records = read_records(tmp_path / "samples.jsonl")
    assert len(records) == 12
    assert settings["seed"] == 42
    assert json.loads((tmp_path / "summary.json").read_text()) == found
    assert set(found["depths"]["one"]["1500"]) == {"0.00", "0.10", "0.20"}


def test_a_line_cut_short_is_done_again_and_other_settings_are_refused(tmp_path: Path) -> None:
    suite = NeedleSuite(Kit(ByteCoder()), needles=2)
    model = Reader(suite)
    options: dict[str, Any] = {"lengths": [1500], "tasks": ["one"], "stop": [258]}
    run_suite(model, suite, tmp_path, samples=2, **options)
    file = tmp_path / "samples.jsonl"
    file.write_text(file.read_text()[:-20])
    seen = []
    run_suite(model, suite, tmp_path, samples=2, watch=lambda *said: seen.append(said), **options)
    assert len(seen) == 1
    assert len(read_records(file)[1]) == 2
    other = NeedleSuite(Kit(ByteCoder()), needles=3)
    with pytest.raises(ValueError, match=r"holds results with needles = 2, not 3: take another"):
        run_suite(model, other, tmp_path, samples=1, **options)
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], "{}", lines[1]]))
    with pytest.raises(ValueError, match=r"samples.jsonl:2 is damaged"):
        run_suite(model, suite, tmp_path, samples=2, **options)


def test_a_sample_named_twice_is_done_once(tmp_path: Path) -> None:
    suite = NeedleSuite(Kit(ByteCoder()), needles=2)
    options: dict[str, Any] = {"lengths": [1500, 1500], "tasks": ["one", "one"], "stop": [258]}
    run_suite(Reader(suite), suite, tmp_path, samples=2, **options)
    assert len(read_records(tmp_path / "samples.jsonl")[1]) == 2


def test_what_cannot_be_made_is_said_before_anything_is_done(tmp_path: Path) -> None:
    suite = RulerSuite(Kit(ByteCoder()), questions={"qa_1": questions(3)})
    options: dict[str, Any] = {"samples": 2}
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"fwe of 100 tokens: length must be at least \d+"):
        run_suite(None, suite, out, lengths=[3000, 100], tasks=["fwe", "vt"], **options)
    needed = suite.prompts.least("qa_1", 2) + suite.reserve("qa_1")
    with pytest.raises(ValueError, match=rf"must be at least {needed} for the first 2 questions"):
        write_prompts(suite, out, lengths=[needed - 1], tasks=["qa_1"], **options)
    assert not out.exists()
    write_prompts(suite, out, lengths=[needed], tasks=["qa_1"], **options)


def questions(count: int, word: str = "thing") -> Questions:
    documents = [f"Sentence {n} about a {word}. " * (n % 7 + 1) for n in range(60)]
    asked = [Asked(f"Q{n}?", (word,), (n, n + 1)) for n in range(count)]
    return Questions(documents, asked)


def test_results_of_other_texts_or_questions_are_refused_and_new_tasks_are_added(
    tmp_path: Path,
) -> None:
    def suite(word: str = "fox", **asked: Questions) -> RulerSuite:
        text = f"The {word} sleeps. A day goes by! ".encode() * 40
        essays = book_sentences([Document("a", text)], ByteCoder(), 4000)
        return RulerSuite(Kit(ByteCoder()), essays, asked)

    def run(suite: RulerSuite, *tasks: str) -> None:
        run_suite(model, suite, tmp_path, lengths=[3000], tasks=tasks, samples=1)

    model = model_of(vocab_size=259).eval()
    run(suite(), "niah_single_2")
    run(suite(qa_1=questions(3)), "niah_single_2", "qa_1")
    run(suite(qa_2=questions(4)), "qa_2")
    settings, records = read_records(tmp_path / "samples.jsonl")
    assert len(records) == 3
    assert set(settings["files"]) == {"qa_1", "qa_2"}
    with pytest.raises(
        ValueError, match=r"holds results with essays_digest = .* take another --out"
    ):
        run(suite("cat"), "niah_single_2")
    with pytest.raises(ValueError, match="holds results with files of qa_1 = "):
        run(suite(qa_1=questions(3, "dog")), "qa_1")


def test_a_folder_without_results_is_of_no_settings(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text(json.dumps({"suite": "ruler", "seed": 1}) + "\n")
    suite = NeedleSuite(Kit(ByteCoder()), needles=2)
    options: dict[str, Any] = {"lengths": [1500], "tasks": ["one"], "stop": [258]}
    run_suite(Reader(suite), suite, tmp_path, samples=1, **options)
    assert read_records(tmp_path / "samples.jsonl")[0]["seed"] == 42


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\x00\x1f\x8b", "samples.jsonl is no text in UTF-8"),
        (b'{"seed": 1}\n{"task": "vt", "score": 1}\n{}\n', "samples.jsonl:2 is damaged"),
        (b"[]\n", "samples.jsonl:1 is damaged"),
    ],
)
def test_damaged_records_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "samples.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_records(tmp_path / "samples.jsonl")


def test_an_answer_that_a_tokenizer_cannot_write_is_not_found_in_every_text(
    tmp_path: Path,
) -> None:
    class NoDigits(ByteCoder):
        def decode(self, tokens: Any) -> str:
            return "".join(x for x in super().decode(tokens) if not x.isdigit())

    suite = NeedleSuite(Kit(NoDigits()), needles=2)
    with pytest.raises(ValueError, match="one: an answer is empty as the tokenizer writes it"):
        run_suite(None, suite, tmp_path, lengths=[1500], samples=1)


def test_samples_of_ruler_are_the_same_each_time_and_of_each_length() -> None:
    first, second = (RulerSuite(Kit(ByteCoder()), seed=seed) for seed in (42, 42))
    other = RulerSuite(Kit(ByteCoder()), seed=43)
    assert len(first.tasks) == 11
    for task in ("niah_multikey_3", "cwe"):
        job = Job(task, 4096, 7)
        prompt = first.sample(job).prompt
        assert np.array_equal(prompt, second.sample(job).prompt)
        assert not np.array_equal(prompt, other.sample(job).prompt)
        assert len(prompt) + first.reserve(task) == 4096


def test_prompts_are_written_as_documents_of_lm_eval(tmp_path: Path) -> None:
    suite = RulerSuite(Kit(ByteCoder()))
    path = write_prompts(suite, tmp_path, lengths=[3000], samples=2)
    documents = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(documents) == 2 * 11
    for one in documents:
        between = "\n\n" if one["task"] == "cwe" else " "  # lm_eval's target_delimiter
        whole = f"{one['input']}{between}{one['gen_prefix']}"
        sample = suite.sample(Job(one["task"], 3000, one["index"]))
        assert whole == bytes(sample.prompt.tolist()).decode()
        assert one["length"] == one["max_length"] == 3000
        assert one["outputs"] == list(sample.expected)
        begins = "The special magic" if one["task"].startswith("niah") else "Answer:"
        assert one["gen_prefix"].startswith(begins)
        assert one["gen_prefix"].endswith((" is", " are", ":"))


def test_answers_are_counted_whole_by_depth_and_by_sequence() -> None:
    task = MultiNeedle(length=400, needles=2, asked="all", depths=(0.0, 1.0), test_sequences=4)
    batch = task.batch("test", range(4))

    class Knows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            logits = torch.zeros(*input_ids.shape, task.vocab_size)
            for row, tokens in enumerate(input_ids):
                for known, labels in zip(batch["input_ids"], batch["labels"], strict=True):
                    if torch.equal(tokens, known):
                        wanted = labels.clamp(min=0)
                        if torch.equal(tokens, batch["input_ids"][3]):
                            wanted = (labels + 1).clamp(min=0) % task.num_classes
                        logits[row].scatter_(1, wanted[:, None], 1.0)
            return logits

    found = exact_matches(Knows(), task, batch_size=3)
    assert found["sequences"] == {"exact": 0.75, "count": 4.0}
    assert found["all"] == {"exact": 0.75, "count": 8.0}
    assert set(found) == {"0%", "100%", "all", "sequences"}


def test_samples_apart_are_sequences_of_their_own() -> None:
    task = MultiNeedle(length=256, mixed=(64,), apart=2, words=64)
    model = nn.Sequential(
        nn.Embedding(task.vocab_size, 4), nn.Linear(4, task.num_classes, bias=False)
    )
    found = exact_matches(model, task, "train", sequences=4, batch_size=2)
    assert found["sequences"]["count"] == found["all"]["count"] == 4 * 256 / 64


@pytest.mark.parametrize("depths", [(), (0.5, 1.5), (-0.1,)])
def test_depths_of_needles_lie_in_the_text(depths: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"depths must lie in \[0, 1\]"):
        NeedleSuite(Kit(ByteCoder()), depths=depths)


def vort(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model_of(vocab_size=259).save_pretrained(tmp_path / "model")
    ByteTokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_command_runs_a_suite_and_shows_a_table(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    base = ("eval", "--suite", "ruler", "--model", saved, "--out", out, "--samples", 1)
    said = vort(*base, "--lengths", "1900,2000", "--tasks", "niah_single_1,vt")
    for word in ("niah_single_1", "vt", "average", "1,900", "2,000", "summary.json"):
        assert word in said
    found = json.loads((out / "summary.json").read_text())
    assert set(found["scores"]) == {"niah_single_1", "vt"}
    assert found["model"] == "model"
    said = vort(*base, "--lengths", "1900", "--tasks", "fwe", "--prompts")
    assert "prompts.jsonl" in said
    assert json.loads((out / "prompts.jsonl").read_text())["task"] == "fwe"
    said = vort(*base, "--lengths", "1900", "--tasks", "fwe", "--seed", 1, code=2)
    assert "holds results with seed = 42, not 1: take another --out" in said


def test_books_and_questions_come_from_the_folder_that_is_named(
    saved: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    for split in ("train", "test"):
        (data / "books" / split).mkdir(parents=True)
        for number in range(20):
            text = f"It was day {number} of {split}. Nothing much happened! " * 30
            (data / "books" / split / f"{number}.txt").write_text(text)
    context = [[f"T{n}", [f"Sentence {n} about a thing. " * 9]] for n in range(40)]
    asked = [{"question": "Q?", "answer": "thing", "context": context[:2]}]
    asked += [{"question": "R?", "answer": "thing", "context": context[2:]}]
    (data / "my_hotpot.json").write_text(json.dumps(asked))
    out = tmp_path / "out"
    base = ("eval", "--suite", "ruler", "--model", saved, "--samples", 1, "--data", data)
    vort(*base, "--lengths", "2000", "--tasks", "niah_single_2,qa_2", "--out", out)
    settings, records = read_records(out / "samples.jsonl")
    assert settings["essays"] == "books"
    assert [one["expected"] for one in records if one["task"] == "qa_2"] == [["thing"]]
    assert "no file *squad*.json" in vort(*base, "--tasks", "qa_1", "--out", out, code=2)


def test_samples_with_books_do_not_depend_on_the_other_lengths(saved: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for number in range(30):
        text = "".join(f"Day {n} of book {number} went by. " for n in range(3000))
        (data / f"{number}.txt").write_text(text)
    base = ("eval", "--suite", "ruler", "--model", saved, "--samples", 2, "--data", data)
    base = (*base, "--tasks", "niah_single_2", "--prompts")
    said = vort(*base, "--lengths", "2000", "--out", tmp_path / "short")
    assert f"essays: texts of {data}" in said
    vort(*base, "--lengths", "2000,9000", "--out", tmp_path / "both")
    short, both = (
        (tmp_path / name / "prompts.jsonl").read_text().splitlines() for name in ("short", "both")
    )
    assert short == both[:2]


def test_what_the_haystack_is_made_of_is_said(saved: Path, tmp_path: Path) -> None:
    base = ("eval", "--model", saved, "--samples", 1, "--prompts", "--lengths", "2000")
    ruler = (*base, "--suite", "ruler", "--out", tmp_path / "ruler", "--tasks")
    assert "essays: made sentences, no --data" in vort(*ruler, "niah_single_2")
    assert "made sentences" not in vort(*ruler, "vt")
    needles = (*base, "--suite", "multi_needle", "--out", tmp_path / "needles")
    assert "haystack: made sentences, no .txt below" in vort(*needles, "--data", tmp_path)


def test_a_model_trained_anew_in_its_folder_is_another(saved: Path, tmp_path: Path) -> None:
    base = ("eval", "--suite", "ruler", "--model", saved, "--out", tmp_path / "out")
    base = (*base, "--samples", 1, "--lengths", "1900", "--tasks", "fwe")
    vort(*base)
    vort(*base)
    torch.manual_seed(1)
    model = model_of(vocab_size=259)
    with torch.no_grad():
        model.lm_head.weight.add_(0.01)
    model.save_pretrained(saved)
    assert "holds results with fingerprint = " in vort(*base, code=2)


def test_a_vocabulary_that_is_not_of_bytes_needs_a_tokenizer(tmp_path: Path) -> None:
    base = ("eval", "--suite", "ruler", "--samples", 1, "--lengths", "1900", "--tasks", "fwe")
    for size in (32, 700):
        model_of(vocab_size=size).save_pretrained(tmp_path / f"of-{size}")
        said = vort(*base, "--model", tmp_path / f"of-{size}", code=2)
        assert f"has no tokenizer, and a vocabulary of {size} is not one of bytes" in said
    model_of(vocab_size=259).save_pretrained(tmp_path / "bytes")
    said = vort(*base, "--model", tmp_path / "bytes", "--out", tmp_path / "out")
    assert "has no tokenizer: text is read as bytes" in said


def test_damaged_weights_and_tokenizers_are_named(saved: Path, tmp_path: Path) -> None:
    base = ("eval", "--suite", "ruler", "--model", saved, "--out", tmp_path / "out")
    base = (*base, "--samples", 1, "--lengths", "1900", "--tasks", "fwe")
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "the weights in" in vort(*base, code=2)
    (saved / "tokenizer_config.json").write_text("{")
    assert "no tokenizer can be read from" in vort(*base, code=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give the folder of a run, or --suite with --model"),
        (("--suite", "ruler"), "--suite needs --model DIR"),
        (("--suite", "rulr", "--model", "x"), "--suite takes ruler or multi_needle, got rulr"),
        (("--suite", "ruler", "--model", "nowhere"), "no such folder: nowhere"),
        (("--suite", "ruler", "--model", "x", "--lengths", "4k"), "--lengths takes whole numbers"),
        (("--suite", "ruler", "--model", "x", "--piece", "0"), "--piece must be at least 1, got 0"),
        (("--suite", "ruler", "--model", "x", "--lengths", "4096.5"), "takes whole numbers"),
        (("--suite", "ruler", "--model", "x", "--lengths", "1e30"), "takes whole numbers"),
        (
            ("--suite", "ruler", "--model", "x", "--prompts", "--piece", "5"),
            "--piece is for answers, and has no effect on --prompts",
        ),
    ],
)
def test_what_cannot_be_is_said_in_a_line(arguments: tuple[str, ...], message: str) -> None:
    assert message in vort("eval", *arguments, code=2)


def test_tasks_that_are_not_there_and_lengths_too_short_are_said(
    saved: Path, tmp_path: Path
) -> None:
    base = ("eval", "--suite", "ruler", "--model", saved, "--out", tmp_path / "out")
    assert "--tasks takes niah_single_1" in vort(*base, "--tasks", "needle", code=2)
    said = vort(*base, "--tasks", "vt", "--lengths", "50", "--samples", 1, code=2)
    assert "length must be at least" in said
    assert "qa_1 needs --data" in vort(*base, "--tasks", "qa_1", code=2)


_CHAT = "<s>{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"


@pytest.fixture(scope="module")
def kits() -> tuple[Kit, Kit]:
    """Words in a tokenizer's tokens, as they are and in a chat."""
    tokenizer: Any = subword_tokenizer()
    tokenizer.chat_template = _CHAT
    plain, chat = (Kit(HuggingFaceCoder(tokenizer, chat=chat)) for chat in (False, True))
    return plain, chat


@pytest.mark.parametrize("task", ["niah_multikey_1", "vt", "cwe", "fwe", "all"])
def test_a_chat_ends_the_users_turn_before_the_words_that_an_answer_begins_with(
    task: str, kits: tuple[Kit, Kit]
) -> None:
    (plain, chat), kind = kits, NeedleSuite if task == "all" else RulerSuite
    tokenizer: Any = chat.coder.tokenizer  # type: ignore[attr-defined]
    suite: Any = kind(chat)
    sample = suite.sample(Job(task, 4096, 0))
    read = suite.prompt(task, sample)
    assert len(read) + suite.reserve(task) <= 4096
    if kind is NeedleSuite or task.startswith(("niah", "vt")):
        assert len(read) + suite.reserve(task) == 4096
    text = tokenizer.decode(read)
    before, after = text.split("<|end|><|assistant|>")
    assert before.startswith("<s><|user|>")
    assert text.count("<|user|>") == 1
    begins = suite.split(task, suite.kit.coder.decode(sample.prompt))[1]
    assert after.strip() == begins
    assert begins or kind is NeedleSuite
    # Without a chat nothing is put anywhere.
    other: Any = kind(plain)
    sample = other.sample(Job(task, 4096, 0))
    assert other.prompt(task, sample) is sample.prompt
    assert "chat" in suite.settings()
    assert "chat" not in other.settings()


def test_a_chat_needs_a_template_and_its_results_are_its_own(tmp_path: Path) -> None:
    tokenizer: Any = subword_tokenizer()
    with pytest.raises(ValueError, match="has no chat template"):
        HuggingFaceCoder(tokenizer, chat=True)
    tokenizer.chat_template = "<s>{{ messages[0].role }}"
    with pytest.raises(ValueError, match="leaves out what a user says"):
        HuggingFaceCoder(tokenizer, chat=True)
    tokenizer.chat_template = _CHAT
    model_of(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    base = ("eval", "--suite", "multi_needle", "--model", tmp_path / "model", "--samples", 1)
    base = (*base, "--lengths", "600", "--tasks", "one", "--needles", 1, "--out", tmp_path / "out")
    vort(*base, "--chat")
    assert "holds results with chat = " in vort(*base, code=2)
    said = vort(*base, "--chat", "--prompts", code=2)
    assert "for --prompts use lm_eval's --apply_chat_template" in " ".join(said.split())


def test_bytes_have_no_chat(saved: Path) -> None:
    said = vort("eval", "--suite", "ruler", "--model", saved, "--chat", code=2)
    assert "--chat needs a tokenizer with a chat template" in " ".join(said.split())
