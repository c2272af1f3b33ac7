"""`vort probe`: what the entity probes find in a text.

How they are trained and judged: `tools/train_entity_probe.py`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vort.lab.commands import as_utf8, read_input, say_replaced
from vort.lab.commands.command import Command

if TYPE_CHECKING:
    from vort.layers.entity_probe import EntityProbe

app = typer.Typer(help="Entity probes: names in a text.", no_args_is_help=True)

Text = Annotated[str, typer.Argument(help="A file, - for standard input, or a text itself.")]


@app.command(cls=Command)
def show(
    text: Text,
    rules: Annotated[bool, typer.Option(help="Use the rules instead of the weights.")] = False,
    causal: Annotated[bool, typer.Option(help="Look at no word that comes later.")] = False,
) -> None:
    """Print the names found in a text, one a line, with their character spans."""
    content = _content(text)
    for start, end in _probe(rules, causal).probe(content):
        typer.echo(f"{start}\t{end}\t{content[start:end]}")


@app.command(cls=Command)
def compare(text: Text) -> None:
    """Print the names that any probe finds, one a line, and which probes do."""
    content = _content(text)
    found: dict[tuple[int, int], list[str]] = {}
    for name, (rules, causal) in {
        "rules": (True, False),
        "rules, causal": (True, True),
        "linear": (False, False),
        "linear, causal": (False, True),
    }.items():
        for span in _probe(rules, causal).probe(content):
            found.setdefault(span, []).append(name)
    for (start, end), names in sorted(found.items()):
        typer.echo(f"{start}\t{end}\t{content[start:end]}\t{'; '.join(names)}")


def _probe(rules: bool, causal: bool) -> "EntityProbe":
    from vort.layers.entity_probe import LinearProbe, RuleProbe

    return RuleProbe(causal=causal) if rules else LinearProbe.pretrained(causal=causal)


def _is_there(path: Path, text: str) -> bool:
    """Whether a text is the name of something; what is too long for a name is none."""
    try:
        return bool(text) and "\0" not in text and path.exists()
    except OSError:
        return False


def _content(text: str) -> str:
    """The text that an argument stands for; what can only be meant as a file must be one."""
    if text == "-":
        return read_input("TEXT")
    path = Path(text)
    if _is_there(path, text):
        if not path.is_file():
            kind = "a folder" if path.is_dir() else "a pipe or a device"
            raise typer.BadParameter(f"TEXT must be a file or a text, and {text} is {kind}")
        return say_replaced(path.read_text(encoding="utf-8", errors="replace"))
    single = not any(letter.isspace() for letter in text)
    if single and (path.suffix or len(path.parts) > 1):
        raise typer.BadParameter(f"no such file: {text}")
    return as_utf8(text)
