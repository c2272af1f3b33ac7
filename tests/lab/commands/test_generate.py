"""`vort generate` and `vort chat`: the model that comes with vort, turns, sessions, clean ends."""

import json
import os
import pty
import re
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

import vort
from tests.forks import COMMAND, Forked
from vort.cli import app
from vort.lab.commands import generate, read_input
from vort.models import ByteTokenizer, VortConfig, VortForCausalLM, VortSession
from vort.pretrained import DEFAULT

ROOT = Path(__file__).parents[3]
runner = CliRunner(env={"TERM": "dumb", "COLUMNS": "200"})
DRAWS = {"do_sample": True, "temperature": 0.5, "top_p": 0.9}


def made(folder: Path, **draws: object) -> Path:
    """A model that nobody trained, with draws of its own."""
    torch.manual_seed(0)
    config = VortConfig(hidden_size=16, num_attention_heads=1, num_hidden_layers=1)
    model = VortForCausalLM(config)
    model.generation_config.update(**draws)
    model.save_pretrained(folder)
    ByteTokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("vort.pretrained.FOLDER", tmp_path / "shipped")
    return made(tmp_path / "shipped" / DEFAULT, **DRAWS)


def written(folder: Path, count: int, **settings: object) -> str:
    """What a session writes after "ab"."""
    model = VortForCausalLM.from_pretrained(folder).eval()
    session = VortSession(model, ByteTokenizer(), seed=3)
    session.feed("ab")
    return "".join(session.stream(count, **settings))


def said(*arguments: object, typed: str = "", code: int = 0) -> tuple[str, str]:
    done = runner.invoke(app, [str(x) for x in arguments], input=typed)
    assert done.exit_code == code, done.output
    return done.stdout, " ".join(done.stderr.split())


def test_without_a_name_the_model_that_comes_with_vort_writes_and_that_is_said(
    shipped: Path,
) -> None:
    text, beside = said("generate", "--prompt", "ab", "--max-new-tokens", 30, "--seed", 3)
    assert text == written(shipped, 30, temperature=0.5, top_p=0.9) + "\n"
    assert beside.startswith(f"no model named: {DEFAULT} is taken, which comes with vort")
    named, quiet = said("generate", DEFAULT, "--prompt", "ab", "--max-new-tokens", 30, "--seed", 3)
    assert named == text
    assert "no model named" not in quiet


def test_in_a_terminal_the_prompt_stands_there_before_anything_is_loaded(
    shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("generate", "--prompt", "ab", "--max-new-tokens", 30, "--seed", 3)
    piped = said(*arguments)[0]
    monkeypatch.setattr(generate, "_is_watched", lambda: True)
    assert said(*arguments)[0] == "ab" + piped

    def unloadable(*_: object) -> None:
        raise ValueError("not yet")

    monkeypatch.setattr(generate, "_open", unloadable)
    assert said(*arguments, code=2)[0] == "ab"


def test_what_is_asked_for_comes_before_the_models_own_draws(shipped: Path) -> None:
    arguments = ("generate", "--prompt", "ab", "--max-new-tokens", 30, "--seed", 3)
    own = written(shipped, 30, temperature=0.5, top_p=0.9)
    hot = said(*arguments, "--temperature", 1.5)[0]
    assert hot == written(shipped, 30, temperature=1.5, top_p=0.9) + "\n" != own
    cold = said(*arguments, "--temperature", 0)[0]
    assert cold == written(shipped, 30, temperature=0) + "\n"


def test_a_model_that_says_nothing_of_draws_has_the_plain_ones(tmp_path: Path) -> None:
    folder = made(tmp_path / "plain")
    text, _ = said("generate", folder, "--prompt", "ab", "--max-new-tokens", 30, "--seed", 3)
    assert text == written(folder, 30) + "\n"


def test_a_folder_comes_before_a_model_of_the_same_name(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / DEFAULT).mkdir()
    assert "holds no model" in said("generate", DEFAULT, code=2)[1]


@pytest.mark.parametrize("command", [["generate"], ["chat"], ["lens", "--text", "README.md"]])
def test_where_no_model_comes_with_vort_one_must_be_named(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vort.pretrained.FOLDER", tmp_path)
    monkeypatch.chdir(ROOT)
    text, beside = said(*command, code=2)
    assert text == ""
    assert beside.startswith(f"vort {command[0]}: MODEL is needed")


def test_the_lens_takes_it_too(shipped: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The cat sat on the mat.")
    _, beside = said("lens", "--text", text, "--out", tmp_path / "page.html")
    assert f"{DEFAULT} is taken" in beside
    assert DEFAULT in (tmp_path / "page.html").read_text()


def test_a_small_model_decodes_by_one_thread_and_gives_the_others_back(
    shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = torch.get_num_threads()
    seen = []
    monkeypatch.setattr(generate, "_show", lambda piece: seen.append(torch.get_num_threads()))
    scripted("abcdef", monkeypatch)
    torch.set_num_threads(2)
    try:
        said("generate", "--prompt", "ab", "--max-new-tokens", 3)
        assert set(seen) == {1}
        assert torch.get_num_threads() == 2
        monkeypatch.setattr(generate, "_SMALL", 1)
        said("generate", "--prompt", "ab", "--max-new-tokens", 3)
        assert seen[-1] == 2
    finally:
        torch.set_num_threads(former)


def scripted(text: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Have every draw be the next byte of a text, then the end of it."""
    tokens = iter([*text.encode(), 258, *b"after"])
    monkeypatch.setattr("vort.sessions.session.sample_token", lambda *_: next(tokens))
    return tokens


def test_a_turn_of_a_chat_ends_with_its_paragraph(
    shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted("\n\none.\n\ntwo\nthree.\n\nfour", monkeypatch)
    text, beside = said("chat", typed="Say\n\nmore\n")
    assert text == "\n\none.\n\n\ntwo\nthree.\n\n\nfour\n"
    assert "the text ends here; what you write now begins another" in beside
    # Lines, what was written, the end of the text, and the beginning of another.
    count = len("Say" + "more") + len("\n\none.\n\ntwo\nthree.\n\nfour") + 2
    assert f" {count} tokens remembered" in beside


def test_a_turn_of_a_chat_has_a_most(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted("abcdefghij", monkeypatch)
    assert said("chat", "--max-new-tokens", 4, typed="x\ny\n")[0] == "abcd\nefgh\n"
    assert "--max-new-tokens must be at least 1" in said("chat", "--max-new-tokens", 0, code=2)[1]


BAD = b"a\xffb"


def test_what_is_no_utf8_is_read_as_such_wherever_it_comes_from(
    shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(generate, "_feed", lambda session, text: read.append(text))
    monkeypatch.setattr(VortSession, "stream", lambda *_, **__: iter(()))
    monkeypatch.setattr("vort.sessions.Session.stream", lambda *_, **__: iter(()))
    # As Python has it in the arguments of a process.
    escaped = BAD.decode("utf-8", "surrogateescape")
    for arguments in (["generate", "--prompt", escaped], ["generate", "--prompt", "-"], ["chat"]):
        done = runner.invoke(app, arguments, input=BAD)
        assert done.exit_code == 0, done.output
        assert "1 places are no UTF-8 and read as U+FFFD." in done.stderr
    assert read == ["a\ufffdb"] * 3


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--temperature", -1, "--temperature must be 0 (greedy) or positive, got -1.0"),
        ("--top-k", 0, "--top-k must be at least 1, got 0"),
        ("--top-p", 2, "--top-p must lie in (0, 1], got 2.0"),
    ],
)
def test_draws_that_cannot_be_are_refused_before_a_session_changes(
    shipped: Path, tmp_path: Path, option: str, value: int, message: str
) -> None:
    file = tmp_path / "talk.safetensors"
    for command in (["chat"], ["generate", "--prompt", "-"]):
        beside = said(*command, "--session", file, option, value, typed="a line\n", code=2)[1]
        assert message in beside
        assert not file.exists()


def test_a_stream_that_is_closed_is_nobodys_and_empty(
    shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as closed:
        closed.setattr(sys, "stdout", None)
        assert not generate._is_watched()
        generate._show("x")
        closed.setattr(sys, "stdin", None)
        assert list(generate._lines()) == []
        with pytest.raises(typer.BadParameter, match="--prompt - needs standard input, which is"):
            read_input("--prompt")


def test_a_chat_is_one_session_and_may_be_taken_up_again(shipped: Path, tmp_path: Path) -> None:
    """In two sittings the same is written as in one, and the memory does not grow."""
    options = ("--seed", 5, "--max-new-tokens", 12)
    whole, end = said("chat", *options, typed="first\nsecond\n")
    file = tmp_path / "talk.safetensors"
    first, between = said("chat", *options, "--session", file, typed="first\n")
    second, after = said("chat", "--max-new-tokens", 12, "--session", file, typed="second\n")
    assert first + second == whole
    assert f"saved to {file}" in between
    size = [re.search(r"in (\d+\.\d) MB", each) for each in (end, between, after)]
    assert len({found and found[1] for found in size}) == 1
    beside = said("chat", *options, "--session", file, typed="")[1]
    assert "--seed 5 has no use" in beside


def test_a_session_keeps_its_draws_and_says_what_they_began_with(
    shipped: Path, tmp_path: Path
) -> None:
    file, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    options = ("--prompt", "ab", "--max-new-tokens", 9, "--temperature", 2)
    first, told = said("generate", *options, "--session", file)
    seed = re.search(r"--seed (\d+)", told)
    assert seed is not None, told
    assert said("generate", *options, "--seed", seed[1])[0] == first
    shutil.copy(file, other)
    beside = [said("generate", *options, "--session", each) for each in (file, other)]
    assert beside[0] == beside[1]
    shutil.copy(file, other)
    found, told = said("generate", *options, "--session", file, "--seed", 7)
    assert f"--seed 7 has no use: {file} goes on with its own draws" in told
    assert found == said("generate", *options, "--session", other)[0]


def test_an_empty_first_line_begins_a_text(shipped: Path) -> None:
    # with a seed: few tokens of any may end within a character
    text, beside = said("chat", "--max-new-tokens", 8, "--seed", 1, typed="\n")
    assert len(text) >= 2
    config = shipped / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "bos_token_id": None}))
    beside = said("chat", typed="\n", code=2)[1]
    assert "a text to go on from is needed" in beside


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[tuple[int, Forked]]:
    """A chat in a terminal of its own."""
    folder = made(tmp_path / "model")
    ours, theirs = pty.openpty()
    command = ["chat", folder, "--session", tmp_path / "talk.safetensors"]
    # The likeliest token is an "e" after every "e": a turn that does not end by itself.
    command += ["--max-new-tokens", "1000000", "--temperature", "0"]
    process = Forked(COMMAND, *command, terminal=theirs, TERM="dumb")
    os.close(theirs)
    yield ours, process
    process.end()
    os.close(ours)


def shown_until(terminal: int, wanted: bytes, seconds: float = 120.0) -> bytes:
    found, ends = b"", time.monotonic() + seconds
    while wanted not in found:
        assert select.select([terminal], [], [], max(ends - time.monotonic(), 0))[0], found
        try:
            found += os.read(terminal, 65536)
        except OSError:  # the other end is closed
            return found
    return found


def test_in_a_terminal_an_interrupt_ends_a_turn_and_the_end_of_input_the_chat(
    terminal: tuple[int, Forked], tmp_path: Path
) -> None:
    ours, process = terminal
    shown_until(ours, b"> ")
    os.write(ours, b"Once\n")
    shown_until(ours, b"Once\r\n")
    assert len(os.read(ours, 1)) == 1  # it writes, and would for hours
    process.send_signal(signal.SIGINT)
    shown_until(ours, b"> ")
    saved = tmp_path / "talk.safetensors"
    assert saved.exists()
    os.write(ours, b"\x04")
    end = shown_until(ours, b"tokens remembered")
    assert b"Traceback" not in end
    assert process.wait(60) == 0


def test_in_a_terminal_an_interrupt_at_ones_own_turn_ends_the_chat(
    terminal: tuple[int, Forked],
) -> None:
    ours, process = terminal
    shown_until(ours, b"> ")
    for _ in range(30):  # one that comes just before the terminal is read is seen after a line only
        process.send_signal(signal.SIGINT)
        if select.select([ours], [], [], 2)[0]:
            break
    assert b"Traceback" not in shown_until(ours, b"stopped")
    assert process.wait(60) == 130


def test_pretrained_path_is_at_the_door() -> None:
    assert vort.pretrained_path is not None
    assert "pretrained_path" in dir(vort)
