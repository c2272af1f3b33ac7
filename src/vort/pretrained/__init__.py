"""Models that come with the package: a folder each, found by name, without a network.

Each is a folder as `save_pretrained` makes it, with a card (README.md) that says what it was
trained on, by which command, and how it scores. `tools/publish_model.py` makes them.
"""

from pathlib import Path

__all__ = ["DEFAULT", "pretrained_names", "pretrained_path"]

# What `vort generate`, `vort chat` and `vort lens` take where no model is named.
DEFAULT = "books-6m"
FOLDER = Path(__file__).parent


def pretrained_names() -> list[str]:
    """Which models are there."""
    return sorted(file.parent.name for file in FOLDER.glob("*/config.json"))


def pretrained_path(name: str = DEFAULT) -> Path:
    """The folder of a model that comes with the package, for all that reads models from folders.

    `VortForCausalLM.from_pretrained(pretrained_path())` is the model, and
    `ByteTokenizer.from_pretrained(pretrained_path())` its tokenizer.

    name: as `pretrained_names` lists them.
    """
    known = pretrained_names()
    if name not in known:
        there = f"those that come with it: {', '.join(known)}" if known else "none comes with it"
        raise FileNotFoundError(f"this installation of vort has no model {name!r}; {there}")
    return FOLDER / name
