"""The commands of `vort`, a file each, and what they share: how options are read."""

import json
import os
import re
import sys
from collections.abc import Collection, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

    from vort.lab.experiments.cell import Size
    from vort.models import VortConfig, VortForCausalLM

__all__ = [
    "Device",
    "Model",
    "as_utf8",
    "books_of",
    "check_page",
    "check_seed",
    "check_writable",
    "find_model",
    "has_vort",
    "is_terminal",
    "load_model",
    "named_or_shipped",
    "quiet_libraries",
    "read_device",
    "read_input",
    "read_minutes",
    "read_names",
    "read_settings",
    "read_size",
    "read_workers",
    "replaced_in_words",
    "replaced_input",
    "say",
    "say_horizon",
    "say_replaced",
]

Model = Annotated[
    str | None, typer.Argument(help="Folder of a model, or of `vort train`; vort's own if absent.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, ...")]

_PYTHON = {"True": True, "False": False, "None": None}
# What every page of ours begins with, and few pages of others: `report/pages/standalone.html`.
_PAGE = (b"<!doctype html>", b'<meta http-equiv="Content-Security-Policy"')


def read_settings(given: Sequence[str] | None, option: str) -> dict[str, Any]:
    """name=value pairs; values are JSON where they can be, or Python's True, False, None, or text.

    >>> read_settings(["bounds=[1, 2]", "use_entropy=False", "memory=none"], "--model-set")
    {'bounds': [1, 2], 'use_entropy': False, 'memory': 'none'}
    """
    found = {}
    for pair in given or ():
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{option} takes name=value, got {pair!r}")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = _PYTHON.get(value, value)
    return found


def read_names(given: str | None, option: str, known: Collection[str]) -> list[str]:
    """Names separated by commas, all of them known; every one if none are given."""
    if given is None:
        return list(known)
    names = [name.strip() for name in given.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"{option} takes {', '.join(known)}, got {', '.join(unknown)}")
    return names


def read_size(scale: str) -> "Size":
    """The size that `--scale` names."""
    from vort.lab.experiments.cell import SIZES

    for size in SIZES:
        if scale == size:
            return size
    raise typer.BadParameter(f"--scale takes {' or '.join(SIZES)}, got {scale}")


def read_workers(workers: int | None) -> int:
    """How many processes work side by side; as many as suit the machine if none are given."""
    from vort.lab.experiments.run import default_workers

    if workers is not None and workers < 1:
        raise typer.BadParameter(f"--workers must be at least 1, got {workers}")
    return default_workers() if workers is None else workers


def read_minutes(minutes: float | None) -> float | None:
    """The seconds that `--minutes` leaves; None: no end."""
    if minutes is not None and not 0 < minutes < float("inf"):
        raise typer.BadParameter(f"--minutes must be positive, got {minutes:g}")
    return None if minutes is None else 60 * minutes


def check_seed(seed: int | None) -> None:
    """Refuse a seed by the rule of `TrainingConfig`, which takes long to load."""
    if seed is not None and not 0 <= seed < 2**32:
        raise typer.BadParameter(f"--seed must lie in [0, {2**32 - 1}], got {seed}")


def as_utf8(text: str) -> str:
    """A text of the command line; bytes that are no UTF-8, which Python hides in it, as U+FFFD.

    >>> as_utf8("caf" + chr(0xDCE9)) == "caf" + chr(0xFFFD)
    True
    """
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def read_input(option: str) -> str:
    """All of standard input; what is no UTF-8 as U+FFFD, said so.

    option: that asks for it.
    """
    if sys.stdin is None:
        raise typer.BadParameter(f"{option} - needs standard input, which is closed")
    return say_replaced(replaced_input().read())


def replaced_input() -> TextIO:
    """Standard input where nothing has been read of it, that gives U+FFFD for what is no UTF-8."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    return sys.stdin


def replaced_in_words(text: str) -> list[str]:
    """A line on how many places of a text could not be read; none where all could."""
    count = text.count("\ufffd")
    return [f"{count} places are no UTF-8 and read as U+FFFD."] if count else []


def say_replaced(text: str) -> str:
    """The text, once it is said how many places of it could not be read."""
    for line in replaced_in_words(text):
        typer.echo(line, err=True)
    return text


def is_terminal(stream: TextIO | None) -> bool:
    """Whether somebody sits at the other end; nobody where a stream is closed, and so None."""
    return stream is not None and stream.isatty()


def read_device(device: str) -> str:
    """The device that `--device` names, if it is there."""
    import torch

    try:
        wanted = torch.device(device)
    except RuntimeError:
        wanted = None
    there = ["cpu", *(f"cuda:{n}" for n in range(torch.cuda.device_count()))]
    there += ["mps"] if torch.backends.mps.is_available() else []
    if wanted is None or not any(str(wanted) in (each, each.split(":")[0]) for each in there):
        raise typer.BadParameter(f"--device must be one of {', '.join(there)}, got {device}")
    return device


def books_of(data: Path | None) -> Path | None:
    """The folder of texts within the folder a user named."""
    if data is None:
        return None
    if not data.is_dir():
        raise typer.BadParameter(f"--data must be a folder, got {data}")
    return data / "books" if (data / "books").is_dir() else data


def check_writable(path: Path, option: str) -> None:
    """Raise where a file could not be written: better before the work than after it."""
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe or a device"
        raise typer.BadParameter(f"{option} must be a file, and {path} is {kind}")
    near = next(parent for parent in path.absolute().parents if parent.exists())
    if not near.is_dir() or not os.access(near, os.W_OK):
        raise typer.BadParameter(f"{option} cannot be written: {near} is no folder for it")


def check_page(path: Path, option: str) -> None:
    """Raise where a page could not be written, or would replace a file that is no page of ours."""
    check_writable(path, option)
    if not path.exists():
        return
    with path.open("rb") as file:
        begins = file.read(512)
    if begins and not all(part in begins for part in _PAGE):
        raise typer.BadParameter(
            f"{option} must be a new file or a page of vort to replace, and {path} is neither"
        )


def say(console: "Console", *parts: str | tuple[str, str], style: str = "") -> None:
    """A line as it is, however long: nothing in it is markup, so a path can be copied.

    parts: a text each, or a text and its style.
    """
    from rich.text import Text

    console.print(Text.assemble(*parts, style=style), soft_wrap=True)


def quiet_libraries() -> None:
    """Turn off the bars that libraries draw of their own accord, and what they murmur."""
    from huggingface_hub.utils.logging import set_verbosity_error
    from huggingface_hub.utils.tqdm import disable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    set_verbosity_error()  # type: ignore[no-untyped-call]
    disable_progress_bars()
    disable_progress_bar()  # type: ignore[no-untyped-call]


def load_model(name: str, device: str) -> "tuple[VortForCausalLM, PreTrainedTokenizerBase]":
    """A saved model in evaluation mode and its tokenizer; without one, text is read as bytes.

    name: a folder that holds one, or that `vort train` made; the name of one that comes with the
        package; or a model of Hugging Face.
    """
    place, device = find_model(name), read_device(device)
    from transformers import AutoTokenizer

    from vort.models import ByteTokenizer, VortForCausalLM

    quiet_libraries()
    try:
        model: VortForCausalLM = VortForCausalLM.from_pretrained(place)
    except OSError as problem:
        if Path(place).is_dir():
            raise
        reason = str(problem).strip().splitlines()[0]
        raise OSError(f"no such folder, and no model of that name: {name} ({reason})") from problem
    model.eval()  # type: ignore[no-untyped-call]
    model.to(device)  # type: ignore[arg-type]  # transformers' annotation hides nn.Module's
    if Path(place).is_dir() and not (Path(place) / "tokenizer_config.json").is_file():
        return model, ByteTokenizer()
    return model, AutoTokenizer.from_pretrained(place)


def named_or_shipped(name: str | None) -> str:
    """The model that a user named; where none is, the one that comes with the package, said so."""
    if name is not None:
        return name
    from vort.pretrained import DEFAULT, pretrained_names

    if DEFAULT not in pretrained_names():
        raise ValueError(
            "MODEL is needed, the folder of a model or of `vort train`: this installation of vort "
            "comes without one"
        )
    typer.echo(f"no model named: {DEFAULT} is taken, which comes with vort", err=True)
    return DEFAULT


def find_model(name: str) -> str:
    """Where the model is that a user means; what is no folder and may be a slip is refused."""
    from vort.pretrained import pretrained_names, pretrained_path

    path = Path(name).expanduser()
    for folder in (path, path / "model"):
        if (folder / "config.json").is_file():
            return str(folder)
    if (path / "run.json").is_file():
        raise ValueError(
            f"the run in {path} has no finished model yet: vort train --out {path} --resume"
        )
    if path.is_dir():
        raise FileNotFoundError(f"{path} holds no model: there is no config.json in it")
    if name in pretrained_names():
        return str(pretrained_path(name))
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) or path.parent.exists():
        raise FileNotFoundError(f"no such folder: {name}")
    return name


def has_vort(config: "VortConfig") -> bool:
    """Whether a layer's memory is VORT's, with orders and a horizon."""
    return any(config.memory_of(layer) == "vort" for layer in range(config.num_hidden_layers))


def say_horizon(model: Any, length: int, remedy: str = "") -> None:
    """Say, once, that a sequence is longer than the lags a model's memory is made for."""
    if getattr(model, "_said_horizon", False) or not has_vort(model.config):
        return
    if length > model.config.horizon:
        model._said_horizon = True
        typer.echo(
            f"{length:,} tokens are more than the horizon of {model.config.horizon:,}: what lies "
            f"further back is kept, but no longer fades as a power law{remedy}",
            err=True,
        )
