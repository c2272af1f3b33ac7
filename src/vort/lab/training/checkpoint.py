"""Where a run stands, on disk: tensors as safetensors, the rest as JSON, never half written.

A checkpoint is a folder `step-00000100` with `model.safetensors`, `optimizer.safetensors`,
`random.safetensors` and `state.json`. It is written under another name and renamed when it is
complete and on disk, and renamed again before it is deleted: whatever carries the name can be
resumed from, and where there is no room for it nothing stays. Processes of one run draw the same
random numbers, so one state is enough.
"""

import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = [
    "complete_folder",
    "latest_checkpoint",
    "load_checkpoint",
    "load_weights",
    "read_state",
    "save_checkpoint",
]

_NAME = re.compile(r"step-(\d+)")


def latest_checkpoint(directory: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    found = [p for p in directory.glob("step-*") if _NAME.fullmatch(p.name)]
    return max(found, key=_step, default=None)


def save_checkpoint(
    directory: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    *,
    keep: int = 1,
) -> Path:
    """Write model, optimiser, random numbers and `state` (JSON); then drop all but `keep`."""
    tensors, settings = _optimizer_state(model, optimizer)
    weights = {name: x.contiguous() for name, x in _unique_tensors(model).items()}
    document = {"step": step, "optimizer": settings, **state}
    with complete_folder(directory / f"step-{step:08d}") as partial:
        _write_tensors(weights, partial / "model.safetensors")
        _write_tensors(tensors, partial / "optimizer.safetensors")
        _write_tensors(_random_state(), partial / "random.safetensors")
        (partial / "state.json").write_text(json.dumps(document, indent=1))
    _clean(directory, keep)
    return directory / f"step-{step:08d}"


@contextmanager
def complete_folder(target: Path) -> Iterator[Path]:
    """A folder to fill, which gets the name `target` when all of it is on disk, else goes away."""
    partial = target.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in (*partial.iterdir(), partial):
            _to_disk(path)
        if target.is_dir():  # a folder cannot be replaced in one go
            shutil.rmtree(target)
        partial.rename(target)
        _to_disk(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path)
    except SafetensorError as problem:  # a full disk, most of all
        raise OSError(f"{path} could not be written: {problem}") from problem


def _read_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found: dict[str, Tensor] = load_file(path)
    except SafetensorError as problem:
        raise ValueError(f"{path} is damaged: {problem}") from problem
    return found


def read_state(path: Path) -> dict[str, Any]:
    """What `state.json` of a checkpoint holds."""
    file = path / "state.json"
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except ValueError as problem:
        raise ValueError(f"{file} is damaged: {problem}") from problem
    return found


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Put everything back in place and return what `state.json` holds."""
    state = read_state(path)
    load_weights(path, model)
    tensors = _read_tensors(path / "optimizer.safetensors")
    _restore_optimizer(model, optimizer, tensors, state["optimizer"])
    _restore_random(_read_tensors(path / "random.safetensors"))
    return state


@torch.no_grad()
def load_weights(path: Path, model: nn.Module) -> None:
    """Copy the weights of a checkpoint into a model made with the same settings."""
    saved, own = _read_tensors(path / "model.safetensors"), _unique_tensors(model)
    if saved.keys() != own.keys():
        odd = sorted(saved.keys() ^ own.keys())[:5]
        raise ValueError(f"{path} is of another model: it differs at {', '.join(odd)}")
    for name, tensor in own.items():
        if tensor.shape != saved[name].shape:
            raise ValueError(
                f"{path} is of another model: {name} has shape {tuple(saved[name].shape)} there, "
                f"{tuple(tensor.shape)} here"
            )
        tensor.copy_(saved[name])


def _unique_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, those with several names (tied weights) under the first."""
    found: dict[str, Tensor] = {}
    seen = set()
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        found[name] = tensor.detach()
    return found


def _parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names in the order in which the optimiser numbers its parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(x)] for group in optimizer.param_groups for x in group["params"]]


def _optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """State tensors by "<parameter>/<what>", and the settings of the groups."""
    names, found = _parameter_names(model, optimizer), optimizer.state_dict()
    tensors = {
        f"{names[number]}/{key}": torch.as_tensor(value).contiguous()
        for number, entries in found["state"].items()
        for key, value in entries.items()
    }
    return tensors, found["param_groups"]


def _restore_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: dict[str, Tensor],
    settings: list[dict[str, Any]],
) -> None:
    numbers = {name: number for number, name in enumerate(_parameter_names(model, optimizer))}
    state: dict[int, dict[str, Tensor]] = {}
    for full, tensor in tensors.items():
        name, _, key = full.rpartition("/")
        state.setdefault(numbers[name], {})[key] = tensor
    # JSON has no tuples, and AdamW compares its betas with none.
    groups = [{**group, "betas": tuple(group["betas"])} for group in settings]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _random_state() -> dict[str, Tensor]:
    """State of every generator that a model may draw from: torch, numpy's and Python's."""
    _, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    _, python, gauss = random.getstate()
    found = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "numpy_place": torch.tensor(position),
        "gauss": torch.tensor([cached, gauss or 0.0], dtype=torch.float64),
        "has_gauss": torch.tensor([has_gauss, gauss is not None]).bool(),
        "python": torch.tensor(python),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def _restore_random(saved: dict[str, Tensor]) -> None:
    torch.set_rng_state(saved["torch"])
    cached, gauss = saved["gauss"].tolist()
    in_numpy, in_python = saved["has_gauss"].tolist()
    keys, place = saved["numpy"].numpy().astype(np.uint32), int(saved["numpy_place"])
    np.random.set_state(("MT19937", keys, place, int(in_numpy), cached))  # noqa: NPY002
    random.setstate((3, tuple(saved["python"].tolist()), gauss if in_python else None))
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])


def _clean(directory: Path, keep: int) -> None:
    """Remove old checkpoints, and what runs that were killed left half written."""
    complete = [p for p in directory.glob("step-*") if _NAME.fullmatch(p.name)]
    for path in sorted(complete, key=_step)[:-keep]:
        path.rename(path.with_suffix(".partial"))
    for path in directory.glob("step-*.partial"):
        shutil.rmtree(path)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _to_disk(path: Path) -> None:
    """Ask the system to write a file or folder through."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
