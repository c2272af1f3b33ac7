"""Where a run stands, on disk: tensors as safetensors, the rest as JSON, never half written.

A checkpoint is a folder `step-00000100` with `model.safetensors`, `optimizer.safetensors`,
`random.safetensors` and `state.json`. It is written under another name and renamed when it is
complete and on disk, and renamed again before it is deleted: whatever carries the name can be
resumed from, and where there is no room for it nothing stays. Processes of one run draw the same
random numbers, so one state is enough.

Where weights are dealt out to processes, each writes its own: torch.distributed.checkpoint puts
them into `shards/`, as safetensors too. Any number of processes, sharded or not, reads either.
"""

import json
import os
import random
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = [
    "complete_folder",
    "is_sharded",
    "latest_checkpoint",
    "load_checkpoint",
    "load_weights",
    "read_state",
    "save_checkpoint",
    "whole_weights",
]

_NAME = re.compile(r"step-(\d+)")
SHARDS = "shards"
_MODEL, _OPTIMIZER = "model:", "optimizer:"


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
    """Write model, optimiser, random numbers and `state` (JSON); then drop all but `keep`.

    Of a model whose weights are dealt out every process must call this.
    """
    if is_sharded(model):
        return _save_shards(directory, step, model, optimizer, state, keep)
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


def is_sharded(model: nn.Module) -> bool:
    """Whether processes have different parts of its weights."""
    return any(_is_cut(x) for x in model.parameters())


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """All weights of a model that is dealt out, in the memory of the first process's CPU.

    Every process must ask.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found: Any = get_model_state_dict(model, options=options)
    return dict(found)


def _save_shards(
    directory: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    keep: int,
) -> Path:
    """`save_checkpoint` where every process writes what it has."""
    import torch.distributed as dist

    checkpoint = import_module("torch.distributed.checkpoint")

    # Whatever a look at other data has put together goes apart again.
    for module in model.modules():
        reshard: Any = getattr(module, "reshard", None)
        if reshard is not None:
            reshard()
    tensors, settings = _optimizer_state(model, optimizer)
    given = {f"{_OPTIMIZER}{name}": x for name, x in tensors.items()}
    given |= {f"{_MODEL}{name}": x for name, x in _unique_tensors(model).items()}
    target, main = directory / f"step-{step:08d}", dist.get_rank() == 0
    partial = target.with_suffix(".partial")
    if main:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    problem: OSError | None = None
    try:
        place = checkpoint.HuggingFaceStorageWriter(str(partial / SHARDS), save_distributed=True)
        with _quiet():
            checkpoint.save(given, storage_writer=place)
        if main:
            _write_tensors(_random_state(), partial / "random.safetensors")
            document = {"step": step, "optimizer": settings, **state}
            (partial / "state.json").write_text(json.dumps(document, indent=1))
            for path in (*partial.rglob("*"), partial):
                _to_disk(path)
            if target.is_dir():
                shutil.rmtree(target)
            partial.rename(target)
            _to_disk(directory)
            _clean(directory, keep)
    except checkpoint.CheckpointException as found:
        first = next(iter(found.failures.values()))
        reason = first[0] if isinstance(first, tuple) else first
        problem = OSError(f"{target} could not be written: {reason}")
    except OSError as found:
        problem = found
    if problem is not None:
        if main:
            shutil.rmtree(partial, ignore_errors=True)
        raise problem
    return target


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch.distributed.checkpoint from saying what it is about to change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


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
    if not isinstance(found, dict):
        raise ValueError(f"{file} is damaged: it must hold an object, got {type(found).__name__}")
    return found


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Put everything back in place and return what `state.json` holds."""
    state = read_state(path)
    load_weights(path, model)
    if (path / SHARDS).is_dir():
        tensors = _read_shards(path, _OPTIMIZER, _empty_moments(optimizer, model))
    else:
        tensors = _read_tensors(path / "optimizer.safetensors")
    _check_learning(path, model, optimizer, tensors, state["optimizer"])
    _restore_optimizer(model, optimizer, tensors, state["optimizer"])
    _restore_random(_read_tensors(path / "random.safetensors"))
    return state


@torch.no_grad()
def load_weights(path: Path, model: nn.Module) -> None:
    """Copy the weights of a checkpoint into a model made with the same settings."""
    own = _unique_tensors(model)
    if (path / SHARDS).is_dir():
        _read_shards(path, _MODEL, own)
        return
    saved = _read_tensors(path / "model.safetensors")
    if saved.keys() != own.keys():
        odd = sorted(saved.keys() ^ own.keys())[:5]
        raise ValueError(f"{path} is of another model: it differs at {', '.join(odd)}")
    for name, tensor in own.items():
        if tensor.shape != saved[name].shape:
            raise ValueError(
                f"{path} is of another model: {name} has shape {tuple(saved[name].shape)} there, "
                f"{tuple(tensor.shape)} here"
            )
        tensor.copy_(_cut_like(saved[name], tensor))


def _read_shards(path: Path, kind: str, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fill tensors, whole or cut, with what processes have written; returns them."""
    import torch.distributed as dist

    checkpoint = import_module("torch.distributed.checkpoint")

    wanted = {f"{kind}{name}": x for name, x in own.items()}
    alone = not (dist.is_available() and dist.is_initialized())
    try:
        place = checkpoint.HuggingFaceStorageReader(str(path / SHARDS))
        known = place.read_metadata().state_dict_metadata
        if kind == _OPTIMIZER:  # what had no gradient yet has no moments
            wanted = {name: x for name, x in wanted.items() if name in known}
        odd = sorted({name for name in known if name.startswith(kind)} ^ wanted.keys())
        if odd:
            names = ", ".join(name.removeprefix(kind) for name in odd[:5])
            raise ValueError(f"{path} is of another model: it differs at {names}")
        with _quiet():
            checkpoint.load(wanted, storage_reader=place, no_dist=alone)
    except checkpoint.CheckpointException as problem:
        reason = " ".join(str(problem).split())
        raise ValueError(f"{path} is damaged, or of another model: {reason}") from problem
    return {name.removeprefix(kind): x for name, x in wanted.items()}


def _empty_moments(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """AdamW's state before anything is known of it."""
    found = {}
    names = _parameter_names(model, optimizer)
    parameters = [x for group in optimizer.param_groups for x in group["params"]]
    for name, x in zip(names, parameters, strict=True):
        found[f"{name}/step"] = torch.zeros(())
        found |= {f"{name}/{key}": torch.zeros_like(x) for key in ("exp_avg", "exp_avg_sq")}
    return found


def _is_cut(x: Tensor) -> bool:
    """Whether a tensor is one of several processes'."""
    return hasattr(x, "placements")


def _cut_like(whole: Tensor, x: Any) -> Tensor:
    """This process's part of a tensor, if x is such a part."""
    if not _is_cut(x) or _is_cut(whole):
        return whole
    from torch.distributed.tensor import distribute_tensor

    place = whole.to(x.device)
    return distribute_tensor(place, x.device_mesh, x.placements, src_data_rank=None)


def _unique_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, those with several names (tied weights) under the first."""
    found: dict[str, Tensor] = {}
    if is_sharded(model):
        # An empty part has no place of its own to be known by.
        found = {name: x.detach() for name, x in model.named_parameters()}
        return found | dict(_kept_buffers(model))
    seen = set()
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        found[name] = tensor.detach()
    return found


def _kept_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        for name, x in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, x


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
        f"{names[number]}/{key}": value if _is_cut(value) else torch.as_tensor(value).contiguous()
        for number, entries in found["state"].items()
        for key, value in entries.items()
    }
    return tensors, found["param_groups"]


def _check_learning(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: dict[str, Tensor],
    settings: list[dict[str, Any]],
) -> None:
    """Raise unless what learns is what learned before: weights may have been frozen since."""
    odd = {name.rpartition("/")[0] for name in tensors} - {*_parameter_names(model, optimizer)}
    before = [len(group["params"]) for group in settings]
    now = [len(group["params"]) for group in optimizer.param_groups]
    if odd or before != now:
        names = f", not {', '.join(sorted(odd)[:5])}" if odd else ""
        raise ValueError(
            f"{path} is of another model: {sum(before)} of its parameters learn, "
            f"here {sum(now)} do{names}"
        )


def _restore_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: dict[str, Tensor],
    settings: list[dict[str, Any]],
) -> None:
    numbers = {name: number for number, name in enumerate(_parameter_names(model, optimizer))}
    parameters = [x for group in optimizer.param_groups for x in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for full, tensor in tensors.items():
        name, _, key = full.rpartition("/")
        number = numbers[name]
        tensor = _cut_like(tensor, parameters[number]) if tensor.ndim else tensor
        state.setdefault(number, {})[key] = tensor
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
