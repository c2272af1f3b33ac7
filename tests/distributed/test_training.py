"""Runs of several processes: checkpoints that any number can take, and what if one process ends."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.distributed import jobs
from tests.distributed.processes import run
from tests.lab.training.tiny import TASK
from vort.lab.training import load_weights
from vort.models import VortForCausalLM

STEP = "step-00000003"
LAST = "step-00000006"
SLOW = pytest.mark.slow


def weights_in(folder: Path, memory: str = "vort", **changes: int) -> dict[str, torch.Tensor]:
    model = jobs.model_of(memory, vocab_size=TASK.vocab_size, **changes)
    load_weights(folder, model)
    return {name: x.detach().clone() for name, x in model.named_parameters()}


def check_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, x in one.items():
        assert torch.allclose(x, other[name], atol=1e-5), name


def test_a_checkpoint_of_four_processes_is_gone_on_with_by_one(tmp_path: Path) -> None:
    found = run(4, jobs.trained, str(tmp_path / "four"), True)
    losses, test = found[0]
    alone, test_alone = jobs.run_of(str(tmp_path / "one"))
    assert np.abs(np.subtract(losses, alone)).max() < 1e-5
    assert test["all"]["count"] == test_alone["all"]["count"]
    assert (tmp_path / "four" / STEP / "shards").is_dir()
    expected = weights_in(tmp_path / "one" / LAST)
    check_same(weights_in(tmp_path / "four" / LAST), expected)
    first = tmp_path / "four" / STEP
    jobs.shutil.copytree(first, tmp_path / "resumed" / STEP)
    jobs.run_of(str(tmp_path / "resumed"))
    check_same(weights_in(tmp_path / "resumed" / LAST), expected)


def test_weights_without_a_gradient_have_no_moments_to_resume_with(tmp_path: Path) -> None:
    bare: Any = {"memory": "none", "sliding_window": 0}
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    run(2, jobs.trained, first, True, None, bare)
    run(2, jobs.trained, second, True, str(tmp_path / "first" / STEP), bare)
    one, two = (weights_in(tmp_path / name / LAST, **bare) for name in ("first", "second"))
    check_same(one, two)


def test_processes_that_ask_unequally_often_learn_what_one_does() -> None:
    (alone,) = run(1, jobs.learned_of_uneven, 1)
    for losses, weights in run(2, jobs.learned_of_uneven, 2):
        assert np.allclose(losses, alone[0], atol=1e-5)
        assert all(np.allclose(x, y, atol=1e-5) for x, y in zip(weights, alone[1], strict=True))


@SLOW
def test_a_checkpoint_of_four_processes_is_gone_on_with_by_two(tmp_path: Path) -> None:
    run(4, jobs.trained, str(tmp_path / "four"), True)
    first = str(tmp_path / "four" / STEP)
    for name, shard in (("two", True), ("plain", False)):
        run(2, jobs.trained, str(tmp_path / name), shard, first)
        check_same(weights_in(tmp_path / name / LAST), weights_in(tmp_path / "four" / LAST))


@SLOW
def test_a_checkpoint_of_one_process_is_gone_on_with_by_two_that_share_weights(
    tmp_path: Path,
) -> None:
    jobs.run_of(str(tmp_path / "one"))
    for name, shard in (("two", True), ("plain", False)):
        run(2, jobs.trained, str(tmp_path / name), shard, str(tmp_path / "one" / STEP))
        check_same(weights_in(tmp_path / name / LAST), weights_in(tmp_path / "one" / LAST))


def test_a_loss_that_is_no_number_is_named_with_step_and_rank() -> None:
    for said in run(2, jobs.broken):
        assert said.startswith("training broke down at step 3 on rank 1 of 2: loss nan")


TEXT = "The quick brown fox jumps over the lazy dog, again and again.\n" * 40
OPTIONS = ["--text", "text.txt", "--size", "tiny", "--steps", "8", "--batch-size", "4"]
OPTIONS += ["--task-set", "length=32", "--training-set", "checkpoint_every=2"]
OPTIONS += ["--training-set", "evaluate_every=8", "--training-set", "test_sequences=4"]


def train_by_command(folder: Path, *options: str, fault: str = "") -> list[tuple[int, str]]:
    (folder / "text.txt").write_text(TEXT)
    given = [*OPTIONS, *options] if "--resume" not in options else list(options)
    return run(2, jobs.command, str(folder / "run"), given, fault, ends=not fault)


@pytest.mark.parametrize("shard", [False, pytest.param(True, marks=SLOW)])
def test_a_killed_process_ends_the_run_in_a_line_and_resuming_ends_as_if_it_had_lived(
    tmp_path: Path, shard: bool
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    way = ("--training-set", f"shard={str(shard).lower()}")
    for folder in (whole, cut):
        folder.mkdir()
    assert [code for code, _ in train_by_command(whole, *way)] == [0, 0]
    first, killed = train_by_command(cut, *way, fault="kill")
    assert killed is None
    code, said = first
    assert code == 2
    lines = [line for line in said.splitlines() if line.startswith("vort train:")]
    assert len(lines) == 1
    assert "another process of this run is gone" in lines[0]
    assert "is whole: start the same command with --resume" in lines[0]
    assert "Traceback" not in said
    assert not (cut / "run" / "result.json").exists()
    assert [code for code, _ in train_by_command(cut, "--resume", *way)] == [0, 0]
    one, other = (load_file(x / "run" / "model" / "model.safetensors") for x in (whole, cut))
    assert all(x.equal(other[name]) for name, x in one.items())
    VortForCausalLM.from_pretrained(cut / "run" / "model")


@SLOW
def test_a_text_too_large_for_memory_is_packed_by_one_process_for_all(tmp_path: Path) -> None:
    whole, mapped = tmp_path / "whole", tmp_path / "mapped"
    for folder, fault in ((whole, ""), (mapped, "large")):
        folder.mkdir()
        assert [code for code, _ in train_by_command(folder, fault=fault)] == [0, 0]
    assert not (whole / "run" / "tokens").exists()
    assert (mapped / "run" / "tokens" / "train.bin").stat().st_size > 2 * 1000
    one, other = (load_file(x / "run" / "model" / "model.safetensors") for x in (whole, mapped))
    assert all(x.equal(other[name]) for name, x in one.items())


@pytest.mark.parametrize("shard", [False, pytest.param(True, marks=SLOW)])
def test_a_full_disk_ends_every_process_in_a_line(tmp_path: Path, shard: bool) -> None:
    way = ("--training-set", f"shard={str(shard).lower()}")
    first, second = train_by_command(tmp_path, *way, fault="full")
    assert [first[0], second[0]] == [2, 2]
    said = first[1].strip().splitlines()[-1]
    assert said.startswith("vort train: ")
    assert "could not be written" in said or "File too large" in said
    assert "Traceback" not in first[1] + second[1]
    assert not second[1].strip().endswith("written")
    assert not list((tmp_path / "run").glob("step-*"))


@SLOW
@pytest.mark.parametrize(
    ("script", "ranks", "options"),
    [
        ("train_plain.py", 4, ["--context", "2", "--length", "512", "--save-every", "3"]),
        ("train_with_trainer.py", 2, ["--length", "64"]),
    ],
)
def test_examples_end_with_a_model_that_generates(
    tmp_path: Path, script: str, ranks: int, options: list[str]
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    root = Path(__file__).parents[2]
    paths = ["--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "run")]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += [f"--nproc_per_node={ranks}", str(root / "examples" / script), *paths]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(root / "src")
    for steps in ("4", "6"):  # the second goes on with the first
        command = [*launch, *options, "--width", "64", "--steps", steps]
        subprocess.run(command, check=True, env=environment, timeout=300, capture_output=True)
    model = VortForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert model.generate(torch.tensor([[84, 104]]), max_new_tokens=3).shape[1] > 2
