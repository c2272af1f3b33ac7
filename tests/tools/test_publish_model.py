"""A run becomes a model of the package: rounded, scored, described; nothing is overwritten."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tools.publish_model import app, command_of, table
from typer.testing import CliRunner

from tools import publish_model
from vort.cli import app as vort
from vort.lab.commands.settings import RunSettings
from vort.lab.tasks import Books
from vort.lab.training import evaluate
from vort.models import VortForCausalLM

runner = CliRunner(env={"TERM": "dumb", "COLUMNS": "200"})
SMALL = ["--steps", "2", "--batch-size", "2", "--task-set", "length=32", "--size", "tiny"]
SMALL += ["--training-set", "test_sequences=0", "--model-set", "hidden_size=16"]
SMALL += ["--model-set", "num_attention_heads=1", "--model-set", "num_hidden_layers=1"]
SCORED = ["--length", "64", "--sequences", "3", "--device", "cpu", "--trained-on", "an abacus"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "novel.txt").write_text("It was the best of times, it was the worst of times. " * 80)
    done = runner.invoke(
        vort, ["train", "--text", str(folder / "novel.txt"), "--out", str(folder / "run"), *SMALL]
    )
    assert done.exit_code == 0, done.output
    return folder / "run"


@pytest.fixture(scope="module")
def published(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    done = runner.invoke(app, [str(run), "--name", "small", "--into", str(folder), *SCORED])
    assert done.exit_code == 0, done.output
    return folder / "small"


def test_matrices_are_rounded_and_read_as_float32(run: Path, published: Path) -> None:
    before = VortForCausalLM.from_pretrained(run / "model").state_dict()
    stored = load_file(published / "model.safetensors")
    assert {x.dtype for x in stored.values() if x.ndim > 1} == {torch.bfloat16}
    model = VortForCausalLM.from_pretrained(published)
    assert model.dtype == torch.float32
    for name, x in model.state_dict().items():
        expected = before[name].bfloat16().float() if x.ndim > 1 else before[name]
        assert torch.equal(x, expected), name
    assert model.generation_config.do_sample
    assert (model.generation_config.temperature, model.generation_config.top_p) == (0.8, 0.95)


def test_scores_are_those_of_what_is_stored(run: Path, published: Path) -> None:
    found = json.loads((published / "scores.json").read_text())["scores"]
    settings = RunSettings.read(run).task
    task = Books(source=settings["source"], marks=True, length=64, bounds=())
    model = VortForCausalLM.from_pretrained(published)
    for split in ("validation", "test"):
        own = evaluate(model, task, split, sequences=3)  # type: ignore[arg-type]
        assert own["all"]["bits"] == pytest.approx(found[split]["all"]["bits"], abs=1e-6)
    rough = found["validation in bfloat16"]["all"]["bits"]
    assert rough == pytest.approx(found["validation"]["all"]["bits"], abs=0.05)


def test_the_card_says_what_one_needs_to_know(published: Path) -> None:
    card = (published / "README.md").read_text()
    record = json.loads((published / "scores.json").read_text())
    assert table(record["scores"]) in card
    for part in (
        "# small",
        'pretrained_path("small")',
        "on an abacus; seed 0,",
        "the first 3 windows of 64 bytes",
        "| train | 1 | 3,604 |",
        "    It was a dark",
    ):
        assert part in card
    assert str(published.parents[1]) not in card + json.dumps(record), "a path of this machine"


def test_the_command_of_the_card_begins_the_same_run(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    settings = RunSettings.read(run)
    words = shlex.split(command_of(settings))
    assert words[:4] == ["vort", "train", "--out", "run"]
    done = runner.invoke(vort, ["train", "--out", str(tmp_path / "again"), *words[4:]])
    assert done.exit_code == 0, done.output
    assert RunSettings.read(tmp_path / "again") == settings


def test_what_is_there_stays_and_what_is_too_large_goes(
    run: Path, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = runner.invoke(app, [str(run), "--name", "small", "--into", str(published.parent)])
    assert again.exit_code == 2
    assert "is there already" in again.output
    monkeypatch.setattr(publish_model, "MOST_BYTES", 1000)
    large = runner.invoke(app, [str(run), "--name", "large", "--into", str(tmp_path), *SCORED])
    assert large.exit_code == 2
    assert "at most 1,000 do" in large.output
    assert list(tmp_path.iterdir()) == []
