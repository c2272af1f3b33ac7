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

from tests.models.cases import model_of
from vort.cli import app
from vort.lab.evaluation import (
    NeedleSuite,
    RulerSuite,
    exact_matches,
    read_records,
    run_suite,
    write,
)
from vort.lab.evaluation.suite import Job
from vort.lab.tasks import MultiNeedle
from vort.lab.tasks.haystack import Kit
from vort.lab.tasks.pieces import ByteCoder
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give the folder of a run, or --suite with --model"),
        (("--suite", "ruler"), "--suite needs --model DIR"),
        (("--suite", "rulr", "--model", "x"), "--suite takes ruler or multi_needle, got rulr"),
        (("--suite", "ruler", "--model", "nowhere"), "no such folder: nowhere"),
        (("--suite", "ruler", "--model", "x", "--lengths", "4k"), "--lengths takes whole numbers"),
        (("--suite", "ruler", "--model", "x", "--piece", "0"), "--piece must be at least 1, got 0"),
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
