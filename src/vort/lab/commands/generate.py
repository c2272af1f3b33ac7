"""`vort generate`: a model writes, token by token, and may go on another day."""

import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vort.lab.commands import check_writable, load_model, say_horizon

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vort.models import VortForCausalLM, VortSession


def generate(
    model: Annotated[str, typer.Argument(help="Folder of a model, or of `vort train`.")],
    prompt: Annotated[str, typer.Option(help="Text to go on from; - reads standard input.")] = "",
    max_new_tokens: Annotated[int, typer.Option(help="How many tokens at most.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from this much probability.")] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Of the draws; another each time if absent. A session keeps its own."),
    ] = None,
    session: Annotated[
        Path | None, typer.Option(help="Go on from this file if it exists; save to it.")
    ] = None,
    save_every: Annotated[int, typer.Option(help="Tokens between saves of the session.")] = 256,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
) -> None:
    """Stream a continuation of the prompt to the terminal."""
    if save_every < 1:
        raise typer.BadParameter(f"--save-every must be at least 1, got {save_every}")
    if session is not None:
        check_writable(session, "--session")
        session.parent.mkdir(parents=True, exist_ok=True)
    drawn = secrets.randbelow(2**31) if seed is None else seed
    state = _open(*load_model(model, device), session, drawn)
    _feed(state, sys.stdin.read() if prompt == "-" else prompt)
    pieces = state.stream(
        max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    begun = saved_at = state.tokens_seen
    try:
        for piece in pieces:
            typer.echo(piece, nl=False)
            sys.stdout.flush()
            if session is not None and state.tokens_seen - saved_at >= save_every:
                state.save(session)
                saved_at = state.tokens_seen
    except KeyboardInterrupt:  # what is written so far counts
        raise typer.Exit(130) from None
    finally:
        typer.echo()
        if session is not None:
            state.save(session)
    count = state.tokens_seen - begun
    fresh = session is None and temperature > 0
    ended = "stopped at the end-of-text token after " if count < max_new_tokens else ""
    typer.echo(f"{ended}{count:,} tokens{f', --seed {drawn}' if fresh else ''}", err=True)
    say_horizon(state.model, state.tokens_seen)


def _open(
    model: "VortForCausalLM",
    tokenizer: "PreTrainedTokenizerBase",
    file: Path | None,
    seed: int,
) -> "VortSession":
    from vort.models import VortSession

    if file is not None and file.exists():
        return VortSession.load(file, model, tokenizer)
    return VortSession(model, tokenizer, seed=seed)


def _feed(session: "VortSession", prompt: str) -> None:
    if prompt:
        session.feed(prompt)
    elif session.tokens_seen == 0:
        begin = session.model.config.bos_token_id
        if begin is None:
            raise ValueError("--prompt is needed: the model has no beginning-of-text token")
        session.feed([begin])
