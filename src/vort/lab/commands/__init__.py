"""The commands of `vort`, a file each, and what they share: how options are read."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vort.lab.experiments.cell import Size
    from vort.models import VortForCausalLM

__all__ = ["books_of", "load_model", "read_names", "read_settings", "read_size", "read_workers"]


def read_settings(given: Sequence[str] | None, option: str) -> dict[str, Any]:
    """name=value pairs; values are JSON where they can be, else text."""
    found = {}
    for pair in given or ():
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{option} takes name=value, got {pair!r}")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
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


def books_of(data: Path | None) -> Path | None:
    """The folder of texts within the folder a user named."""
    if data is None:
        return None
    if not data.is_dir():
        raise typer.BadParameter(f"--data must be a folder, got {data}")
    return data / "books" if (data / "books").is_dir() else data


def load_model(name: str, device: str) -> "tuple[VortForCausalLM, PreTrainedTokenizerBase]":
    """A saved model in evaluation mode and its tokenizer; without one, text is read as bytes."""
    from transformers import AutoTokenizer

    from vort.models import ByteTokenizer, VortForCausalLM

    model: VortForCausalLM = VortForCausalLM.from_pretrained(name)
    model.eval()  # type: ignore[no-untyped-call]
    model.to(device)  # type: ignore[arg-type]  # transformers' annotation hides nn.Module's
    if Path(name).is_dir() and not (Path(name) / "tokenizer_config.json").is_file():
        return model, ByteTokenizer()
    return model, AutoTokenizer.from_pretrained(name)
