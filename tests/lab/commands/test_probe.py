"""`vort probe`: a text, a file, standard input; what is none of them is an error."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vort.lab.commands.probe import app

TEXT = "Then old Mr. Darcy spoke to Elizabeth."


@pytest.mark.parametrize("given", ["text", "file", "-"])
@pytest.mark.parametrize("options", [[], ["--rules"]])
def test_names_are_shown_with_their_spans(tmp_path: Path, given: str, options: list[str]) -> None:
    file = tmp_path / "page.txt"
    file.write_text(TEXT)
    argument = {"text": TEXT, "file": str(file), "-": "-"}[given]
    done = CliRunner().invoke(app, ["show", argument, *options], input=TEXT)
    assert done.exit_code == 0, done.output
    rows = [line.split("\t") for line in done.output.splitlines()]
    assert [(TEXT[int(start) : int(end)], name) for start, end, name in rows] == [
        ("Mr. Darcy", "Mr. Darcy"),
        ("Elizabeth", "Elizabeth"),
    ]


def test_probes_are_compared_name_by_name() -> None:
    done = CliRunner().invoke(app, ["compare", TEXT])
    assert done.exit_code == 0, done.output
    (elizabeth,) = [line for line in done.output.splitlines() if "Elizabeth" in line]
    assert elizabeth.endswith("rules; rules, causal; linear; linear, causal")


@pytest.mark.parametrize("command", ["show", "compare"])
@pytest.mark.parametrize("path", ["nowhere.txt", "no/such/page"])
def test_a_path_that_leads_nowhere_is_an_error(command: str, path: str) -> None:
    done = CliRunner().invoke(app, [command, path])
    assert done.exit_code == 2
    assert path in done.output


def test_an_empty_text_has_no_names() -> None:
    done = CliRunner().invoke(app, ["compare", ""])
    assert (done.exit_code, done.output) == (0, "")


@pytest.mark.parametrize("text", ["Elizabeth_" * 40, "It was Elizabeth. " * 300])
def test_a_text_that_is_too_long_for_a_name_is_a_text(text: str) -> None:
    done = CliRunner().invoke(app, ["show", text])
    assert done.exit_code == 0, done.output


def test_one_word_is_a_text() -> None:
    assert CliRunner().invoke(app, ["show", "rain"]).exit_code == 0


def test_what_is_no_file_is_named_as_what_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, kind in ((tmp_path, "a folder"), (pipe, "a pipe or a device")):
        done = CliRunner().invoke(app, ["show", str(path)])
        assert done.exit_code == 2
        assert f"{path.name} is {kind}" in done.output.replace("\n", "")


def test_bytes_of_a_file_that_are_no_utf8_are_counted_aloud(tmp_path: Path) -> None:
    file = tmp_path / "page.txt"
    file.write_bytes(b"Then old Mr. Darcy spoke \xff to Elizabeth.")
    done = CliRunner().invoke(app, ["show", str(file)])
    assert done.exit_code == 0, done.output
    assert "1 places are no UTF-8 and read as U+FFFD." in done.stderr
    assert "Elizabeth" in done.stdout
