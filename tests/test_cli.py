import json
import os
import re
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from vort.cli import app
from vort.fractional import PowerLawBasis
from vort.lab.commands.command import Command

runner = CliRunner(env={"TERM": "dumb"})
TEXT = ["--text", __file__, "--out", "run"]


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_kernel_prints_basis_certificate_and_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vort.lab.commands.kernel.console", Console(width=120))
    picture, saved = tmp_path / "kernels.png", tmp_path / "basis.json"
    arguments = ["kernel", "--horizon", "10000", "--tolerance", "2e-3"]
    result = runner.invoke(app, [*arguments, "--plot", str(picture), "--save", str(saved)])
    output = plain(result.output)
    assert result.exit_code == 0, output
    assert "11 shared rates" in output
    assert "worst relative error 1.3" in output
    rows = {re.split(r"\s{2,}", line)[0]: line for line in output.splitlines()}
    assert "15" in rows["Legendre, as printed"]
    assert "150" in rows["Legendre, as printed"]
    assert "1.8e-01" in rows["Legendre, E1 corrected"]  # order .9 fails, as E2 says
    assert rows["shared rates (ours)"].count("1.3e-03") >= 3
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert PowerLawBasis.load(saved).terms == 11


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kernel", "--horizon", "0"], "horizon must be a whole number >= 1, got 0"),
        (["kernel", "--tolerance", "1e-9"], "tolerance must be reachable within 64 terms"),
        (["kernel", "--tolerance", "0.1", "--terms", "4"], "give either terms or tolerance"),
        (
            ["reproduce", "--only", "dreams"],
            "babi, complexity, orders, plasticity, got dreams",
        ),
        (
            ["reproduce", "--only", "pilot", "--cells", "nomatch"],
            "--cells nomatch fits no cell of pilot; there are pilot-laptop-vort-beta1.0-seed0,",
        ),
        (["reproduce", "--only", "kernel", "--cells", "*"], "fits no cell of kernel; there are no"),
        (["reproduce", "--workers", "0"], "--workers must be at least 1, got 0"),
        (["reproduce", "--scale", "huge"], "--scale takes laptop or paper, got huge"),
        (["reproduce", "--set", "nonsense"], "--set takes name=value, got 'nonsense'"),
        (
            ["reproduce", "--only", "pilot", "--set", "training.learning_rat=1"],
            "has no setting 'training.learning_rat'; did you mean training.learning_rate?",
        ),
        (
            ["reproduce", "--only", "pilot", "--set", "model.num_scale=1"],
            "did you mean model.num_scales?",
        ),
        (["reproduce", "--only", "pilot", "--set", "task.lenght=1"], "did you mean task.length?"),
        (["tune", "orders"], "books_deep, books_deeper, needles, got 'orders'"),
        (["tune", "books", "--scale", "paper"], "books has no cells to tune at --scale paper"),
        (["tune", "pilot", "--workers", "0"], "--workers must be at least 1, got 0"),
        (["figures", "nope"], "RUN_DIR must be a folder that vort reproduce wrote, got nope"),
        (["report", "nope"], "nope is not a folder"),
        (["train", "dreams", "--out", "nowhere"], "label_copy, mqar, multi_needle"),
        (["reproduce", "--only", "books", "--scale", "paper"], "--scale paper needs --data"),
        (["train", "--out", "run"], "give --text FILE, FOLDER or OWNER/NAME, or a TASK"),
        (["train", "--out", "run", "--resume"], "run holds no run of vort train"),
        (["train", "books", "--text", "a.txt", "--out", "run"], "give a TASK or --text, not both"),
        (["train", "--text", "nope.txt", "--out", "run"], "no such file or folder: nope.txt"),
        (["train", "books", "--size", "6m", "--out", "run"], "--size is of models of text"),
        (["train", "books", "--out", "run", "--steps", "0"], "train: --steps must be at least 1"),
        (
            ["train", "books", "--out", "run", "--epochs", "-5"],
            "--epochs must be at least 1, got -5",
        ),
        (["train", *TEXT, "--epochs", "0"], "train: --epochs must be at least 1, got 0"),
        (["train", *TEXT, "--batch-size", "0"], "train: --batch-size must be at least 1, got 0"),
        (["train", *TEXT, "--seed", "-1"], "train: --seed must lie in [0, 4294967295], got -1"),
        (["train", *TEXT, "--seed", "4294967296"], "--seed must lie in [0, 4294967295], got 42949"),
        (["generate", "--seed", "-1"], "generate: --seed must lie in [0, 4294967295], got -1"),
        (["chat", "--seed", "4294967296"], "chat: --seed must lie in [0, 4294967295], got 42949"),
        (
            ["train", *TEXT, "--task-set", "length=1"],
            "train: --task-set length must be at least 16 for a text, got 1",
        ),
        (
            ["train", *TEXT, "--model-set", "vocab_size=10"],
            "--model-set vocab_size must be at least 259, ByteTokenizer's, got 10",
        ),
        (
            ["train", "label_copy", "--out", "run", "--model-set", "vocab_size=3"],
            ", those of label_copy, got 3",
        ),
        (
            ["train", *TEXT, "--model-set", "pad_token_id=300"],
            "--model-set pad_token_id must lie in [0, 258], got 300",
        ),
        (
            ["train", *TEXT, "--steps", "50", "--training-set", "steps=1"],
            "give --steps or --training-set steps, not both: got 50 and 1",
        ),
        (
            ["train", *TEXT, "--task-set", "source=other.txt"],
            "give --text or --task-set source, not both",
        ),
        (
            ["train", "scan", "--out", "run", "--seed", "3", "--task-set", "seed=4"],
            "give --seed or --task-set seed, not both: got 3 and 4",
        ),
        (
            ["train", "books", "--out", "run", "--task-set", "length=many"],
            "--task-set length must be a whole number, got 'many'",
        ),
        (
            ["train", "books", "--out", "run", "--model-set", "use_entropy=perhaps"],
            "--model-set use_entropy must be true or false, got 'perhaps'",
        ),
        (
            ["train", "books", "--out", "run", "--training-set", "betas=3"],
            "--training-set betas must be a list, each a number, got 3",
        ),
        (["train", "books", "--out", "/proc/run"], "vort train: No such file or directory: /proc"),
        (["eval", "nope"], "nope holds no run of vort train"),
        (["eval", "nope", "--batch-size", "-4"], "eval: --batch-size must be at least 1, got -4"),
        (
            ["eval", "nope", "--lengths", "4096"],
            "eval: --lengths is for --suite; for a run use --task-set length=",
        ),
        (
            ["eval", "nope", "--device", "cpu"],
            "--device is for --suite, and has no effect on a run",
        ),
        (
            ["eval", "--suite", "ruler", "--model", "nope", "--sequences", "3"],
            "eval: --sequences is for a run; for --suite use --samples",
        ),
        (
            ["eval", "--suite", "ruler", "--model", "nope", "--needles", "3"],
            "--needles is for --suite multi_needle, and has no effect on --suite ruler",
        ),
        (["eval", "--suite", "ruler", "--model", "nope", "--seed", "-1"], "--seed must lie in [0,"),
        (["generate", "nope"], "vort generate: no such folder: nope"),
        (["generate", "."], "holds no model: there is no config.json in it"),
        (["lens", ".", "--text", "nope.txt"], "--text must be a file, got nope.txt"),
        (["kernel", "--plot", "a.doc"], "--plot must end in .png or .svg or .pdf, got a.doc"),
        (["kernel", "--save", "a.doc"], "--save must end in .json or .safetensors, got a.doc"),
        (["generate", "--save-every", "5"], "--save-every needs a --session to be saved"),
        (["probe", "show", "/"], "TEXT must be a file or a text, and / is a folder"),
    ],
)
def test_bad_options_are_explained(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VORT_DATA", raising=False)
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert "hub" not in result.output.lower()
    flat = " ".join(plain(result.output).replace("│", " ").split())
    # Words too long for a line of the terminal are cut anywhere.
    assert message.replace(" ", "") in flat.replace(" ", "")
    assert not list(tmp_path.iterdir()), "a command that did nothing left something behind"


def test_the_version_is_said() -> None:
    import vort

    assert runner.invoke(app, ["--version"]).output == f"vort {vort.__version__}\n"


def test_settings_may_be_spelled_as_in_python_or_with_an_exponent() -> None:
    from vort.lab.commands import read_settings
    from vort.lab.tasks import Books
    from vort.names import typed

    given = read_settings(["length=1e3", "marks=True", "max_bytes=None", "column=7"], "--task-set")
    assert typed(Books, given) == {"length": 1000, "marks": True, "max_bytes": None, "column": "7"}


def test_a_logger_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vort.lab.training.setup.find_spec", lambda name: None)
    options = ["--task-set", "length=64", "--out", str(tmp_path / "run"), "--log", "wandb"]
    result = runner.invoke(app, ["train", "books", *options])
    assert result.exit_code == 2
    assert result.output.endswith("--log wandb needs the package wandb: pip install wandb\n")
    assert not (tmp_path / "run").exists()


def test_a_device_that_is_not_there_is_named(tmp_path: Path) -> None:
    from vort import ByteTokenizer, VortConfig, VortForCausalLM

    config = VortConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=1)
    VortForCausalLM(config).save_pretrained(tmp_path)
    ByteTokenizer().save_pretrained(tmp_path)
    result = runner.invoke(app, ["generate", str(tmp_path), "--device", "cuda:99"])
    assert result.exit_code == 2
    assert "--device must be one of cpu" in result.output


def test_what_we_broke_ourselves_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("ours")

    monkeypatch.setattr("vort.lab.commands.kernel.check_writable", broken)
    result = runner.invoke(app, ["kernel", "--plot", "a.png"])
    assert isinstance(result.exception, KeyError)


def test_memory_that_is_not_there_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object) -> None:
        torch.empty(2**55)

    monkeypatch.setattr("vort.lab.commands.kernel.check_writable", asked)
    result = runner.invoke(app, ["kernel", "--plot", "a.png"])
    assert result.exit_code == 2
    assert "vort kernel: there is no memory for 144,115,188.1 GB at once" in plain(result.output)


def test_reproduce_writes_a_report_with_computed_verdicts(tmp_path: Path) -> None:
    result = runner.invoke(app, ["reproduce", "--only", "kernel", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    folder = tmp_path / "kernel"
    record = json.loads((folder / "summary.json").read_text())
    verdicts = {claim["where"]: claim["verdict"] for claim in record["verdicts"]}
    assert verdicts["theorem soe"] == "reproduced once corrected"
    assert verdicts["abstract"] == "not reproduced"
    assert verdicts["theorem quant"] == "reproduced"
    assert {"command", "torch", "device"} <= set(record["made_by"])
    for figure in record["figures"]:
        assert (folder / figure["file"]).stat().st_size > 10_000
    assert "theorem soe" in (tmp_path / "report.html").read_text()


def test_reproduce_trains_cells_once_and_ends_with_tables_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vort.lab.commands.reproduce.console", Console(width=160))
    arguments = ["reproduce", "--only", "pilot,orders", "--cells", "*-vort-*seed0"]
    arguments += ["--share", "0.02", "--out", str(tmp_path), "--workers", "1"]
    first = runner.invoke(app, arguments)
    assert first.exit_code == 0, first.output
    assert "VORT (ours)" in first.output
    again = runner.invoke(app, arguments)
    assert "1 of 1 cells are done already" in again.output
    summary = json.loads((tmp_path / "pilot" / "summary.json").read_text())
    assert summary["scale"] == "laptop"
    assert summary["sheets"][0]["rows"][0][0] == "VORT (ours)"
    assert "Learned orders" in (tmp_path / "report.html").read_text()


def test_any_setting_of_a_cell_can_be_changed_and_nothing_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unrendered: None
) -> None:
    monkeypatch.setattr("vort.lab.commands.reproduce.console", Console(width=200))
    arguments = ["reproduce", "--only", "pilot,complexity", "--cells", "pilot-*-vort-*seed0"]
    arguments += ["--share", "0.02", "--out", str(tmp_path), "--workers", "1"]
    assert runner.invoke(app, arguments).exit_code == 0
    (plain_cell,) = (tmp_path / "pilot" / "cells").iterdir()
    before = plain_cell.read_bytes()
    changes = ["--set", "training.learning_rate=1e-3", "--set", "model.num_scales=4"]
    changes += ["--set", "task.length=500"]
    changed = runner.invoke(app, [*arguments, *changes])
    assert changed.exit_code == 0, changed.output
    assert plain_cell.read_bytes() == before
    assert len(list((tmp_path / "pilot" / "cells").iterdir())) == 2
    assert "1 of 1 cells are done already" in runner.invoke(app, [*arguments, *changes]).output
    # A later summary shows both, with the change in the label.
    assert runner.invoke(app, [*arguments, "--no-run"]).exit_code == 0
    summary = json.loads((tmp_path / "pilot" / "summary.json").read_text())
    words = "model.num_scales=4 task.length=500 training.learning_rate=0.001"
    labels = [row[0] for row in summary["sheets"][0]["rows"]]
    assert labels == ["VORT (ours)", f"VORT (ours) [{words}]"]
    assert f"VORT (ours) [{words}] 0.001 (not searched)" in " ".join(summary["notes"])
    # What has no part in it is left alone.
    assert not (tmp_path / "complexity").exists()


def test_figures_that_cannot_be_drawn_are_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vort.lab.commands.figures.console", Console(width=200))
    result = runner.invoke(app, ["figures", str(tmp_path), "--only", "overview"])
    assert result.exit_code == 2
    assert "left out" in result.output
    assert not list(tmp_path.iterdir())


def test_a_run_of_train_can_be_scored_again(tmp_path: Path) -> None:
    sizes = ["length=100", "pairs=4", "keys=8", "test_sequences=8", "validation_sequences=4"]
    options = [part for size in sizes for part in ("--task-set", size)]
    model = ["hidden_size=16", "num_attention_heads=1", "num_hidden_layers=1"]
    options += [part for size in model for part in ("--model-set", size)]
    folder = ["--out", str(tmp_path)]
    trained = runner.invoke(app, ["train", "zipf_retrieval", *folder, "--steps", "2", *options])
    assert trained.exit_code == 0, trained.output
    result = json.loads((tmp_path / "result.json").read_text())
    scored = runner.invoke(app, ["eval", str(tmp_path)])
    assert f"{result['test']['all']['bits']:.3f}" in scored.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["kernel", "--horizon", "100", "--save", "OUT/basis.json"],
        ["kernel", "--horizon", "100", "--save", "OUT/basis.safetensors"],
        ["kernel", "--horizon", "100", "--plot", "OUT/kernels.png"],
        ["generate", "MODEL", "--max-new-tokens", "2", "--session", "OUT/state.safetensors"],
        ["lens", "MODEL", "--text", "TEXT", "--out", "OUT/lens.html"],
        ["report", "RUN", "--out", "OUT/report.html"],
        ["reproduce", "--only", "kernel", "--out", "OUT"],
    ],
    ids=lambda arguments: " ".join(arguments[::3]),
)
def test_a_full_disk_is_a_line_and_leaves_no_file(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unrendered: None
) -> None:
    from vort import ByteTokenizer, VortConfig, VortForCausalLM

    if "MODEL" in arguments:
        config = VortConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=1)
        VortForCausalLM(config).save_pretrained(tmp_path / "MODEL")
        ByteTokenizer().save_pretrained(tmp_path / "MODEL")
    (tmp_path / "TEXT").write_text("Call me Ishmael.")
    (tmp_path / "RUN" / "pilot" / "cells").mkdir(parents=True)
    (tmp_path / "OUT").mkdir()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vort.files.os.fsync", full)
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert result.output.splitlines()[-1].startswith(f"vort {arguments[0]}: No space left on dev")
    assert "Traceback" not in result.output
    assert not [path for path in (tmp_path / "OUT").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "MODEL", "--session", "PIPE"],
        ["chat", "MODEL", "--session", "PIPE"],
        ["lens", "MODEL", "--text", "PIPE"],
        ["lens", "MODEL", "--text", "TEXT", "--out", "PIPE"],
        ["report", "RUN", "--out", "PIPE"],
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_a_pipe_in_place_of_a_file_is_a_line_and_not_waited_for(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "TEXT").write_text("Call me Ishmael.")
    (tmp_path / "RUN" / "pilot" / "cells").mkdir(parents=True)
    os.mkfifo(tmp_path / "PIPE")
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2, result.output
    (line,) = result.output.splitlines()
    assert line.startswith(f"vort {arguments[0]}: {arguments[-2]} must be a file")
    assert "PIPE" in line
    assert (tmp_path / "PIPE").is_fifo()


@pytest.mark.parametrize(
    ("problem", "rank", "said"),
    [
        (ValueError("steps must be at least 1, got 0"), "0", "vort x: steps must be at least 1"),
        (ValueError("steps must be at least 1, got 0"), "1", ""),
        (MemoryError("no room"), "1", "vort x: rank 1: no room"),
        (ConnectionError("another process is gone"), "1", "vort x: another process is gone"),
    ],
)
def test_of_several_processes_the_first_speaks_for_all_and_others_for_themselves(
    monkeypatch: pytest.MonkeyPatch, problem: Exception, rank: str, said: str
) -> None:
    def command() -> None:
        raise problem

    monkeypatch.setenv("RANK", rank)
    own = typer.Typer()
    own.command("x", cls=Command)(command)
    own.callback()(lambda: None)
    found = CliRunner().invoke(own, ["x"])
    assert found.exit_code == 2
    assert found.output.strip().startswith(said)
    assert bool(found.output.strip()) == bool(said)
