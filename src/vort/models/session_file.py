"""Session states on disk: written whole or not at all, and refused when damaged."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vort.files import write_atomically

__all__ = ["read_state", "write_state"]

FORMAT = "vort-session-2"


def write_state(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write `tensors` and the JSON object `about` to one safetensors file, atomically.

    Whoever reads `path`, at any time, finds the former state or this one, complete.
    """
    from safetensors.torch import save

    stored = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}
    text = json.dumps(about, sort_keys=True)
    metadata = {"format": FORMAT, "about": text, "sha256": _digest(stored, text)}
    write_atomically(path, save(stored, metadata))


def read_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors (on the CPU) and the JSON object of a file written by `write_state`."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        raise FileNotFoundError(f"no session at {path}")
    if not path.is_file():  # reading a pipe would never end
        raise ValueError(f"{path} is no regular file, so it cannot be a session")
    try:
        with safe_open(str(path), framework="pt") as stored:
            metadata = stored.metadata() or {}
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except SafetensorError as problem:
        raise ValueError(f"{path} is damaged or no session: {problem}") from problem
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{path} is no session of this version: its format must be {FORMAT!r}, "
            f"got {metadata.get('format')!r}"
        )
    if metadata.get("sha256") != _digest(tensors, metadata.get("about", "")):
        raise ValueError(f"{path} is damaged: its contents do not match their checksum")
    try:
        about = json.loads(metadata.get("about", ""))
    except json.JSONDecodeError:
        about = None
    if not isinstance(about, dict):
        raise ValueError(f"{path} is damaged: what it says about itself is no JSON object")
    return tensors, about


def _digest(tensors: Mapping[str, Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    update_digest(digest, tensors)
    return digest.hexdigest()


def update_digest(digest: Any, tensors: Mapping[str, Tensor]) -> None:
    """Add names, types, shapes and bytes of `tensors` to a hashlib digest."""
    for name in sorted(tensors):
        x = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {x.dtype} {list(x.shape)} ".encode())
        digest.update(x.reshape(-1).view(torch.uint8).numpy().data)
