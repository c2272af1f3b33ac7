"""Where pages and pictures go: nothing of a user's is replaced, and paths are said as they are."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from vort.cli import app
from vort.lab.commands import check_page, lens, say

runner = CliRunner(env={"TERM": "dumb"})
PAGE = '<!doctype html><meta charset><meta http-equiv="Content-Security-Policy" content>'


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("book.txt", "--out must be another file than --text, got book.txt"),
        ("link.txt", "--out must be another file than --text, got link.txt"),
        ("notes.html", "--out must be a new file or a page of vort to replace, and notes.html is"),
    ],
)
def test_the_lens_replaces_no_file_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("Call me Ishmael.")
    Path("link.txt").symlink_to("book.txt")
    Path("notes.html").write_text("<!doctype html><title>Notes</title>")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    done = runner.invoke(app, ["lens", "--text", "book.txt", "--out", out])
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_report_replaces_no_file_of_others(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("Mine.")
    done = runner.invoke(app, ["report", str(tmp_path), "--out", str(tmp_path / "notes.txt")])
    assert done.exit_code == 2
    assert "--out must be a new file or a page of vort to replace" in done.output
    assert (tmp_path / "notes.txt").read_text() == "Mine."


def test_a_page_of_ours_and_an_empty_file_may_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("Call me Ishmael.")
    Path("empty.html").touch()
    check_page(Path("empty.html"), "--out")
    done = runner.invoke(app, ["lens", "--text", "book.txt", "--out", "empty.html"])
    assert done.exit_code == 0, done.output
    assert Path("empty.html").stat().st_size
    check_page(Path("empty.html"), "--out")


@pytest.mark.parametrize("name", ["[draft].html", "v[/2].html", "a:car:b.html", "x" * 90 + ".html"])
def test_a_path_is_said_as_it_is(name: str) -> None:
    shown = StringIO()
    say(Console(file=shown, width=80), "lens: ", (name, "bold"), " (1 MB)")
    assert shown.getvalue() == f"lens: {name} (1 MB)\n"


def test_the_lens_says_where_its_page_is_however_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lens, "_open", lambda *_: (None, None))
    monkeypatch.setattr(lens, "_page", lambda *_: (PAGE, []))
    Path("book.txt").write_text("Call me Ishmael.")
    Path("v[").mkdir()
    done = runner.invoke(app, ["lens", "--text", "book.txt", "--out", "v[/2].html"])
    assert done.exit_code == 0, done.output
    assert "lens: v[/2].html (0.0 MB)" in done.output
    assert Path("v[/2].html").read_text() == PAGE
