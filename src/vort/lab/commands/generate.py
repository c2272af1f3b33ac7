"""`vort generate` and `vort chat`: a model writes, token by token, and may go on another day."""

import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from vort.lab.commands import (
    Device,
    Model,
    as_utf8,
    check_seed,
    check_writable,
    find_model,
    is_terminal,
    load_model,
    named_or_shipped,
    read_device,
    read_input,
    replaced_input,
    say_horizon,
    say_replaced,
)

if TYPE_CHECKING:
    from vort.models import VortSession
    from vort.sessions import Session as AnySession

Temperature = Annotated[
    float | None,
    typer.Option(help="0 takes the likeliest token; if absent the model's own, or 1."),
]
TopK = Annotated[
    int | None, typer.Option(help="Draw from the k likeliest; if absent the model's own.")
]
TopP = Annotated[
    float | None, typer.Option(help="Draw from this much probability; if absent the model's own.")
]
Seed = Annotated[
    int | None,
    typer.Option(help="Of the draws; another each time if absent. A session keeps its own."),
]
Session = Annotated[
    Path | None, typer.Option(help="Go on from this file if it exists; save to it.")
]

# A step of fewer parameters is over before several threads have met: they would wait for each
# other, and busily, for longer than they work. So is a piece of text of fewer tokens.
_SMALL, _SHORT = 50_000_000, 256


def generate(
    model: Model = None,
    prompt: Annotated[str, typer.Option(help="Text to go on from; - reads standard input.")] = "",
    max_new_tokens: Annotated[int, typer.Option(help="How many tokens at most.")] = 200,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    session: Session = None,
    save_every: Annotated[
        int | None, typer.Option(help="Tokens between saves of the session; 256 if absent.")
    ] = None,
    device: Device = "cpu",
) -> None:
    """Stream a continuation of the prompt to the terminal."""
    if save_every is not None and save_every < 1:
        raise typer.BadParameter(f"--save-every must be at least 1, got {save_every}")
    if save_every is not None and session is None:
        raise typer.BadParameter("--save-every needs a --session to be saved")
    check_seed(seed)
    drawn = secrets.randbelow(2**31) if seed is None else seed
    name = named_or_shipped(model)
    prompt = as_utf8(prompt)
    if prompt != "-" and _is_watched():
        _show(prompt)  # somebody is waiting: the text goes on from here
    state = _open(name, device, session, drawn)
    resumed = _says_draws(state, session, seed)
    drawing = _drawing(state.model, temperature, top_k, top_p)
    _feed(state, read_input("--prompt") if prompt == "-" else say_replaced(prompt))
    pieces = state.stream(max_new_tokens, **drawing)
    begun = saved_at = state.tokens_seen
    try:
        with fitting_threads(state.model):
            for piece in pieces:
                _show(piece)
                if session is not None and state.tokens_seen - saved_at >= (save_every or 256):
                    _save(state, session)
                    saved_at = state.tokens_seen
    except KeyboardInterrupt:  # what is written so far counts
        raise typer.Exit(130) from None
    finally:
        typer.echo()
        _save(state, session)
    count = state.tokens_seen - begun
    fresh = not resumed and drawing["temperature"] > 0
    ended = "stopped at the end-of-text token after " if count < max_new_tokens else ""
    typer.echo(f"{ended}{count:,} tokens{f', --seed {drawn}' if fresh else ''}", err=True)
    say_horizon(state.model, state.tokens_seen)


def chat(
    model: Model = None,
    max_new_tokens: Annotated[int, typer.Option(help="Of a turn, at most.")] = 500,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    session: Session = None,
    device: Device = "cpu",
) -> None:
    """Write in turns: each line you give is gone on from, to the end of the paragraph.

    An empty line asks for more. Whatever was read and written stays in a memory that does not
    grow. Ctrl-C ends a turn, or, where it is yours, the conversation; so does the end of the input.
    """
    if max_new_tokens < 1:
        raise typer.BadParameter(f"--max-new-tokens must be at least 1, got {max_new_tokens}")
    check_seed(seed)
    drawn = secrets.randbelow(2**31) if seed is None else seed
    state = _open(named_or_shipped(model), device, session, drawn)
    _says_draws(state, session, seed)
    drawing = _drawing(state.model, temperature, top_k, top_p)
    typer.echo("write, and it goes on; an empty line asks for more, Ctrl-D ends", err=True)
    for line in _lines():
        _feed(state, line)
        try:
            if _paragraph(state, max_new_tokens, drawing):
                typer.echo("\nthe text ends here; what you write now begins another", err=True)
                _begin(state)
        except KeyboardInterrupt:  # what is written so far counts
            if not is_terminal(sys.stdin):
                raise typer.Exit(130) from None
        finally:
            typer.echo()
            _save(state, session)
        say_horizon(state.model, state.tokens_seen)
    size = f", in {state.nbytes / 1e6:.1f} MB" if state.tokens_seen else ""
    kept = f"; saved to {session}" if session is not None and state.tokens_seen else ""
    typer.echo(f"{state.tokens_seen:,} tokens remembered{size}{kept}", err=True)


def _says_draws(state: "AnySession", file: Path | None, seed: int | None) -> bool:
    """Whether a session was there, and goes on with draws of its own, whatever was asked."""
    resumed = state.tokens_seen > 0
    if seed is not None and resumed:
        typer.echo(f"--seed {seed} has no use: {file} goes on with its own draws", err=True)
    return resumed


def _lines() -> Iterator[str]:
    """What a user types, line by line, until its end; asked for where somebody sits there."""
    if sys.stdin is None:  # closed: as an input that is at its end
        return
    typed = replaced_input()
    if not is_terminal(typed):
        for line in typed:
            yield say_replaced(line.rstrip("\n"))
        return
    while True:
        try:
            yield say_replaced(input("> "))
        except EOFError:
            typer.echo(err=True)
            return


def _paragraph(session: "AnySession", most: int, drawing: dict[str, Any]) -> bool:
    """Stream to the next empty line, or `most` tokens; whether the end of the text came first."""
    written, begun = "", session.tokens_seen
    with fitting_threads(session.model):
        for piece in session.stream(most, **drawing):
            _show(piece)
            written += piece
            if written.endswith("\n\n") and written.strip():
                return False
    return session.tokens_seen - begun < most


def _is_watched() -> bool:
    """Whether what is written goes to a terminal, not to a file or another program."""
    return is_terminal(sys.stdout)


def _show(piece: str) -> None:
    typer.echo(piece, nl=False)  # which flushes


@contextmanager
def fitting_threads(model: Any = None, tokens: int = 1) -> Iterator[None]:
    """One thread while a small model reads few tokens on a CPU; as many as before afterwards.

    model: None while it is being loaded, which is many small steps too.
    """
    import torch

    former = torch.get_num_threads()
    small = model is None or sum(x.numel() for x in model.parameters()) < _SMALL
    if small and tokens < _SHORT and (model is None or model.device.type == "cpu"):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(former)


def _drawing(
    model: Any, temperature: float | None, top_k: int | None, top_p: float | None
) -> dict[str, Any]:
    """How tokens are drawn: as asked, else as the model's generation_config.json has it."""
    from vort.sessions.session import _check_sampling

    found: dict[str, Any] = {"temperature": 1.0, "top_k": None, "top_p": None}
    own = model.generation_config
    asked = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    for given in ({} if own is None or not own.do_sample else own.to_dict(), asked):
        found |= {name: given[name] for name in found if given.get(name) is not None}
    _check_sampling(**found)  # before anything is read, or saved
    return found


def _open(name: str, device: str, file: Path | None, seed: int) -> "AnySession":
    """The session in a file, or a new one, of a model.

    Where none is to be saved the model may be one without Hugging Face, which takes most of the
    time that a small one needs to begin.
    """
    if file is not None:
        check_writable(file, "--session")
        file.parent.mkdir(parents=True, exist_ok=True)
    with fitting_threads():
        if file is None and read_device(device) == "cpu":
            from vort.sessions import Bytes, Session, read_bare

            bare = read_bare(find_model(name))
            if bare is not None:
                return Session(bare, Bytes(), seed=seed)
        model, tokenizer = load_model(name, device)
    from vort.models import VortSession

    if file is not None and file.exists():
        return VortSession.load(file, model, tokenizer)
    return VortSession(model, tokenizer, seed=seed)


def _save(session: "AnySession", file: Path | None) -> None:
    """Write a session to its file; one without a file may be of a kind that cannot be saved."""
    if file is not None:
        cast("VortSession", session).save(file)


def _feed(session: "AnySession", prompt: str) -> None:
    with fitting_threads(session.model, len(prompt)):
        if prompt:
            session.feed(prompt)
        elif session.tokens_seen == 0 and not _begin(session):
            raise ValueError(
                "a text to go on from is needed: the model has no beginning-of-text token"
            )


def _begin(session: "AnySession") -> bool:
    """Feed the token that texts begin with; whether there is one."""
    begin = session.model.config.bos_token_id
    if begin is not None:
        session.feed([begin])
    return begin is not None
