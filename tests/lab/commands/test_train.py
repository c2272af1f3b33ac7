"""`vort train` on a text of one's own: nothing else to say, nothing silent, nothing lost."""

import json
import re
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.forks import COMMAND, Forked
from vort.cli import app
from vort.lab.commands.settings import RunSettings
from vort.lab.commands.train import _in_steps, _plan, _refuse_files_of_others, make_task_of
from vort.lab.training import TrainingConfig, latest_checkpoint

runner = CliRunner(env={"TERM": "dumb", "COLUMNS": "200"})
SMALL = ["--steps", "4", "--batch-size", "2", "--task-set", "length=32"]
SMALL += [
    part
    for each in ("hidden_size=16", "num_attention_heads=1", "num_hidden_layers=1")
    for part in ("--model-set", each)
]
NOVEL = "It was the best of times, it was the worst of times. " * 40


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "novel.txt"
    file.write_text(NOVEL)
    return file


def vort(*arguments: object, fails: bool = False) -> str:
    done = runner.invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == (2 if fails else 0), done.output
    assert "Traceback" not in done.output
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", done.output).split())


def test_what_the_layers_of_a_hybrid_have_is_said_in_a_line(text: Path, tmp_path: Path) -> None:
    hybrid = ["num_hidden_layers=4", 'layer_memories=["gla", "none"]']
    more = [part for each in hybrid for part in ("--model-set", each)]
    said = vort("train", "--text", text, "--out", tmp_path / "run", *SMALL, *more)
    assert "4 layers of 16, memory 1 x gla, 1 x none, in turn" in said


def test_a_file_is_all_that_is_needed_and_the_folder_goes_everywhere(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = vort("train", "--text", "novel.txt", "--out", "run", *SMALL)
    for part in (
        "text, split by position",
        "train 1 1,802 85%",
        "validation 1 106 5%",
        "test 1 212 10%",
        "device: CPU",
        "tiny, ",
        "memory: about",
        "time: ",
        "training 4/4 loss",
        "tokens/s",
        "validation at step 1:",
        "vort generate run",
        "vort lens run",
        'from_pretrained("run/model")',
        "lm_eval --model hf",
    ):
        assert part in said, part
    assert json.loads(Path("run/run.json").read_text())["task"]["source"] == "../novel.txt"
    from vort import VortForCausalLM

    saved = VortForCausalLM.from_pretrained("run/model")
    assert saved.config.hidden_size == 16
    # From another folder, and after both have moved.
    (tmp_path / "elsewhere").mkdir()
    for name in ("run", "novel.txt"):
        Path(name).rename(tmp_path / "elsewhere" / name)
    monkeypatch.chdir("/")
    run = tmp_path / "elsewhere" / "run"
    result = json.loads((run / "result.json").read_text())
    scored = vort("eval", run)
    assert f"{result['test']['all']['bits']:.3f}" in scored
    assert "not over" not in scored
    assert "4/4" not in vort("train", "--out", run, "--resume")  # nothing left to do but score
    assert "5 tokens" in vort("generate", run, "--max-new-tokens", "5", "--seed", "1")
    page = tmp_path / "lens.html"
    vort("lens", run, "--text", tmp_path / "elsewhere" / "novel.txt", "--out", page)
    assert page.stat().st_size > 10_000


def test_without_any_other_option_a_small_model_is_planned(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defaults of a machine without a GPU: minutes, not hours."""
    seen = {}

    def no_training(model, task, config, **options):  # type: ignore[no-untyped-def]
        seen.update(model=model, task=task, config=config)
        raise ValueError("not now")

    monkeypatch.setattr("vort.lab.training.train", no_training)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    vort("train", "--text", text, "--out", tmp_path / "run", fails=True)
    assert sum(x.numel() for x in seen["model"].parameters()) < 500_000
    assert seen["config"].steps * seen["config"].batch_size * seen["task"].length < 400_000
    assert seen["config"].evaluate_every is not None
    assert seen["task"].vocab_size == 259  # ends of texts are learned, other tokens unlearned


@pytest.mark.parametrize("name", ["tiny", "6m", "25m", "125m"])
def test_sizes_have_the_parameters_they_are_named_for(name: str) -> None:
    import torch

    from vort.lab.training.sizes import TEXT_SIZES
    from vort.models import VortConfig, VortForCausalLM

    with torch.device("meta"):
        model = VortForCausalLM(VortConfig(**TEXT_SIZES[name].model))
    count = sum(x.numel() for x in model.parameters())
    assert count == pytest.approx(TEXT_SIZES[name].parameters, rel=0.05)
    if name != "tiny":
        assert count == pytest.approx(1e6 * int(name[:-1]), rel=0.05)


def test_a_folder_that_holds_a_run_is_left_as_it_is(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    vort("train", "--text", text, "--out", run, *SMALL)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    other = ["--model-set", "num_scales=4"]
    said = vort("train", "--text", text, "--out", run, *SMALL, *other, fails=True)
    assert "holds a run already, step-00000004: take another --out, or go on with:" in said
    assert "--resume" in said
    assert "resume=True" not in said
    for wrong, name in (
        (other, "--model-set num_scales must be 8,"),
        (["--learning-rate", "0.5"], "--learning-rate must be 0.005,"),
        (["--steps", "9"], "--steps must be 4,"),
        (["--size", "6m"], "--size must be 'tiny',"),
        (["--task-set", "length=64"], "--task-set length must be 32,"),
    ):
        assert name in vort("train", "--out", run, "--resume", *wrong, fails=True)
    vort("train", "--text", text, "--out", run, "--resume", *SMALL)  # the same may be said again
    assert {p: p.read_bytes() for p in before if p.name in ("run.json", "model.safetensors")} == {
        p: x for p, x in before.items() if p.name in ("run.json", "model.safetensors")
    }


@pytest.mark.parametrize("name", ["model/notes.md", "result.json", "tokens/coins.txt", "run.json"])
def test_what_is_there_and_of_no_run_is_left_as_it_is(
    text: Path, tmp_path: Path, name: str
) -> None:
    theirs = tmp_path / "run" / name
    theirs.parent.mkdir(parents=True, exist_ok=True)
    theirs.write_text('{"theirs": 1}')
    said = vort("train", "--text", text, "--out", tmp_path / "run", *SMALL, fails=True)
    refused = {
        "run.json": "run.json is damaged: ",
        "result.json": "result.json is there, of no run: take another --out",
    }
    assert refused.get(name, f"{theirs.parent} is there, of no run: take another --out") in said
    found = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert found == [theirs]
    assert theirs.read_text() == '{"theirs": 1}'


def test_a_folder_of_a_run_that_was_refused_or_saved_nothing_may_be_taken(tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    (packed / "tokens").mkdir(parents=True)
    (packed / "tokens" / "index.json").write_text("{}")
    _refuse_files_of_others(packed)
    begun = tmp_path / "begun"
    (begun / "model").mkdir(parents=True)
    RunSettings({"name": "label_copy"}).write(begun)
    _refuse_files_of_others(begun)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"task": {}}', "task must have a name, got {}"),
        ('{"task": 3}', "task must be settings by name, got 3"),
        ('{"task": {"name": "scan"}, "training": []}', "training must be settings by name, got []"),
        ("[1]", ""),
    ],
)
def test_settings_that_are_none_of_a_run_are_damaged(
    tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "run.json").write_text(content)
    for command in (["eval", tmp_path], ["train", "--out", tmp_path, "--resume"]):
        assert f"{tmp_path / 'run.json'} is damaged: {message}" in vort(*command, fails=True)


def test_other_model_settings_are_refused_below_the_command_too(tmp_path: Path) -> None:
    from tests.lab.training.tiny import TASK, quick
    from vort.lab.training import train
    from vort.models import VortConfig, VortForCausalLM

    def model(theta: float) -> VortForCausalLM:
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
        return VortForCausalLM(VortConfig(vocab_size=TASK.vocab_size, rope_theta=theta, **sizes))

    train(model(1e4), TASK, quick(steps=1), directory=tmp_path)
    with pytest.raises(ValueError, match=r"model.rope_theta must be 10000.0, .*got 500.0"):
        train(model(500.0), TASK, quick(steps=1), directory=tmp_path, resume=True)


def test_one_run_at_a_time_is_in_a_folder_and_a_dead_one_stops_nobody(
    text: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    holder = "import sys, time; from vort.lab.training.lock import hold\n"
    holder += "with hold(sys.argv[1]): print('held', flush=True); time.sleep(60)"
    other = Forked(holder, run)
    try:
        assert other.stdout.readline() == "held\n"
        said = vort("train", "--text", text, "--out", run, *SMALL, fails=True)
        assert f"process {other.pid} is training in" in said
        assert [path.name for path in run.iterdir()] == ["run.lock"]
    finally:
        other.end()
    assert (run / "run.lock").exists()  # left behind, and of no consequence
    vort("train", "--text", text, "--out", run, *SMALL)
    assert not (run / "run.lock").exists()


# Enough that a signal comes in time, on a quick machine too.
LONGER = [*SMALL[2:], "--steps", "120", "--workers", "1"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    (folder / "novel.txt").write_text(NOVEL)
    vort("train", "--text", folder / "novel.txt", "--out", folder / "run", *LONGER)
    return folder / "run"


@pytest.mark.parametrize(
    "asked", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_an_interrupt_saves_and_the_run_goes_on_by_itself(
    text: Path, tmp_path: Path, asked: signal.Signals, uninterrupted: Path
) -> None:
    """Piped: lines come as it trains. What comes out is that of a run without interruption."""
    cut = tmp_path / "cut"
    child = Forked(COMMAND, "train", "--text", text, "--out", cut, *LONGER)
    lines = []
    try:
        for line in child.stdout:
            lines.append(line)
            if re.match(r"training \d+/120  loss \d", line):
                child.send_signal(asked)
                break
        else:
            pytest.fail("".join(lines))
        rest = child.stdout.read()
        assert child.wait() == 130, rest
    finally:
        child.end()
    assert re.search(
        r"stopped at step \d+ of 120, saved; go on with: vort train --out \S+cut", rest
    )
    saved = latest_checkpoint(cut)
    assert saved is not None
    assert 1 <= int(saved.name[5:]) < 120
    assert "no finished model yet" in vort("generate", cut, fails=True)
    vort("train", "--out", cut, "--resume")
    first, second = (load_file(run / "model/model.safetensors") for run in (cut, uninterrupted))
    assert all(first[key].equal(second[key]) for key in second)


def test_when_its_minutes_are_over_a_run_is_saved_and_goes_on(text: Path, tmp_path: Path) -> None:
    """What comes out is that of a run without an end in between, and the limit is not kept."""
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    said = vort("train", "--text", text, "--out", cut, *SMALL, "--minutes", "1e-9")
    assert "stopped at step 1 of 4, saved; go on with: vort train --out" in said
    assert "step 1 of 4: the run is not over" in vort("eval", cut, "--sequences", "1")
    assert "stopped at step 2 of 4" in vort("train", "--out", cut, "--resume", "--minutes", "1e-9")
    assert "stopped" not in vort("train", "--out", cut, "--resume")
    vort("train", "--text", text, "--out", whole, *SMALL)
    first, second = (load_file(run / "model" / "model.safetensors") for run in (cut, whole))
    assert all(first[key].equal(second[key]) for key in second)
    more = ("train", "--text", text, "--out", tmp_path / "no", *SMALL, "--minutes", "0")
    assert "--minutes must be positive, got 0" in vort(*more, fails=True)


def test_epochs_may_be_said_again_to_a_run_that_counts_steps(text: Path, tmp_path: Path) -> None:
    run, small = tmp_path / "run", [*SMALL]
    at = small.index("--steps")
    del small[at : at + 2]
    once = ("train", "--out", run, *small, "--epochs")
    vort(*once, 1, "--text", text, "--minutes", "1e-9")
    steps = json.loads((run / "run.json").read_text())["training"]["steps"]
    assert "--steps must be" in vort(*once, 2, "--resume", fails=True)
    assert "--epochs must be" in vort(*once, 2, "--resume", "--steps", steps, fails=True)
    vort(*once, 1, "--resume")
    assert json.loads((run / "run.json").read_text())["training"]["steps"] == steps > 1


def test_a_text_that_is_read_over_and_over_is_trained_on_with_more_weight_decay(
    text: Path, tmp_path: Path
) -> None:
    def planned(**training: float) -> float:
        task = {"name": "books", "source": str(text), "marks": True, "length": 32}
        given = RunSettings(task, {}, {"batch_size": 2, **training})
        decay: float = _plan(given, tmp_path)[0].training["weight_decay"]
        return decay

    usual, more = planned(epochs=9), planned(epochs=11)
    assert usual == TrainingConfig.weight_decay < more
    assert planned(steps=2) == usual
    assert planned(steps=2000) == more
    assert planned(epochs=11, weight_decay=0.3) == 0.3
    run = ("train", "--out", tmp_path / "run", "--text", text, "--minutes", "1e-9", *SMALL)
    assert f"passes over the text, weight decay {more:g} " in vort(*run, "--steps", "2000")


def test_epochs_are_those_of_a_task_whose_length_was_not_said(text: Path) -> None:
    text.write_text(100 * NOVEL)
    own = RunSettings({"name": "books", "source": str(text)}, {}, {"steps": 9, "batch_size": 2})
    task = make_task_of(own)
    given = _in_steps(RunSettings({}, {}, {"epochs": 2}), own, task)
    assert given.training == {"steps": round(task.characters("train") / task.length)}


def test_what_does_not_fit_is_refused_before_it_starts(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, books = tmp_path / "run", ["books", "--task-set", f"source={text}", *SMALL]
    for free, words in (
        (10_000, "for the weights alone"),
        (200_000, "of memory a sequence, and 0 MB are free: take a smaller"),
    ):
        monkeypatch.setattr(
            "vort.lab.training.forecast.free_memory", lambda device, free=free: free
        )
        assert words in vort("train", *books, "--out", run, fails=True)
    assert not run.exists()
    # Room for one sequence at a time: the batch is split, where nobody said how.
    free = 16_000_000
    monkeypatch.setattr("vort.lab.training.forecast.free_memory", lambda device: free)
    wide = ["--text", text, "--out", run, *SMALL, "--batch-size", "64"]
    said = vort("train", *wide, "--accumulation", "1", fails=True)
    pieces = re.search(r"--accumulation (\d+) would do", said)
    assert pieces is not None, said
    said = vort("train", "--text", text, "--out", run, *SMALL, "--batch-size", 10**6, fails=True)
    assert "--batch-size must be of at most 1,024 pieces that fit one by one, got 1,000,000" in said
    vort("train", *wide, "--steps", "1")
    assert json.loads((run / "run.json").read_text())["training"]["accumulation"] == int(pieces[1])


def test_a_damaged_checkpoint_is_named(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    vort("train", "--text", text, "--out", run, *SMALL)
    file = run / "step-00000004" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    assert f"{file} is damaged" in vort("eval", run, fails=True)
    assert f"{file} is damaged" in vort("train", "--out", run, "--resume", fails=True)
    (run / "step-00000004" / "state.json").write_text("{")
    assert "state.json is damaged" in vort("train", "--out", run, "--resume", fails=True)
    (run / "run.json").write_text("{")
    assert "run.json is damaged" in vort("eval", run, fails=True)


NEARLY_FULL = """
import resource, sys
sys.dont_write_bytecode = True  # half of it would be left to all that come after
resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, 8_000))
"""


def test_a_full_disk_leaves_nothing_half_written(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    child = Forked(NEARLY_FULL + COMMAND, "train", "--text", text, "--out", run, *SMALL)
    try:
        said = child.stdout.read()
        assert child.wait() == 2, said
    finally:
        child.end()
    assert "Traceback" not in said
    assert re.search(r"^vort train: .*model.safetensors could not be written", said, re.MULTILINE)
    assert [path.name for path in run.iterdir()] == ["run.json"]


def test_beyond_the_horizon_is_said_once(text: Path, tmp_path: Path) -> None:
    run, short = tmp_path / "run", ["--model-set", "horizon=16"]
    said = vort("train", "--text", text, "--out", run, *SMALL, *short)
    assert said.count("more than the horizon of 16") == 1
    said = vort("eval", run, "--task-set", "length=64")
    assert said.count("64 tokens are more than the horizon of 16") == 1
    assert "--horizon 64" in said
    assert "horizon" not in vort("eval", run, "--task-set", "length=64", "--horizon", "64")


def test_generate_differs_from_time_to_time_and_says_where_it_ended(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    vort("train", "--text", text, "--out", run, *SMALL)
    capfd.readouterr()
    first, second = (vort("generate", run, "--max-new-tokens", "40") for _ in range(2))
    assert first != second
    seed = re.search(r"--seed (\d+)$", first)
    assert seed is not None
    assert vort("generate", run, "--max-new-tokens", "40", "--seed", seed[1]) == first
    # Nothing but ours is drawn.
    assert "%|" not in "".join(capfd.readouterr())
    config = json.loads((run / "model" / "config.json").read_text())
    config["eos_token_id"] = list(range(config["vocab_size"]))
    (run / "model" / "config.json").write_text(json.dumps(config))
    assert "stopped at the end-of-text token after 1 tokens" in vort("generate", run)


def test_a_checkpoint_comes_as_minutes_go_by(tmp_path: Path) -> None:
    from tests.lab.training.tiny import TASK, quick, tiny
    from vort.lab.training import train

    config = quick(checkpoint_minutes=1e-6, keep_checkpoints=9)
    train(tiny(), TASK, config, directory=tmp_path)
    assert len(list(tmp_path.glob("step-*"))) == 6


def test_lines_come_while_it_trains_where_no_bar_can_be_drawn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.lab.training.tiny import TASK, quick, tiny
    from vort.lab.training import train

    monkeypatch.setattr("vort.lab.training.progress.EVERY", 0.0)
    monkeypatch.setattr("vort.lab.training.run.EVERY", 0.0)
    began = time.perf_counter()
    train(tiny(), TASK, quick(progress=True, evaluate_every=3))
    assert time.perf_counter() > began
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("training")] == [
        f"{n}/6" for n in range(1, 7)
    ]
    assert all(part in lines[1] for part in ("loss", "tokens/s", "left"))
    assert any(line.startswith("validation at step 3:") for line in lines)


def test_a_run_from_before_the_output_gate_was_the_default_goes_on(
    text: Path, tmp_path: Path
) -> None:
    run, without = tmp_path / "run", ["--model-set", "output_gate=false"]
    vort("train", "--text", text, "--out", run, *SMALL, *without)
    before = vort("eval", run)
    settings = json.loads((run / "run.json").read_text())
    del settings["model"]["output_gate"]
    (run / "run.json").write_text(json.dumps(settings))
    assert vort("eval", run) == before
    vort("train", "--out", run, "--resume", *without)
    message = "--model-set output_gate must be False, as when the run"
    assert message in vort(
        "train", "--out", run, "--resume", "--model-set", "output_gate=true", fails=True
    )


def test_a_run_on_a_task_has_the_defaults_of_today_and_says_so(tmp_path: Path) -> None:
    for given, gate in (({}, True), ({"output_gate": False}, False)):
        found, _ = _plan(RunSettings({"name": "label_copy"}, given), tmp_path)
        assert found.model["output_gate"] is gate
