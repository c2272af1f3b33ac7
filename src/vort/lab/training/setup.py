"""What a config asks for: Accelerate, AdamW with decay where it belongs, the rate of each step."""

import atexit
import os
import warnings
from importlib.util import find_spec
from math import ceil, cos, pi
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vort.lab.tasks import Task
from vort.lab.training.config import TrainingConfig

__all__ = [
    "check_tracker",
    "decays",
    "learning_rate_at",
    "make_accelerator",
    "make_optimizer",
    "shard",
    "total_steps",
    "uses_bf16",
    "wants_shards",
]

# What `accelerate launch --use_fsdp` says.
_FSDP = "ACCELERATE_USE_FSDP"
_MATRICES = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d)


def make_accelerator(config: TrainingConfig, directory: Path | None) -> Any:
    """An `Accelerator` with the precision and trackers of a config, random numbers seeded."""
    from accelerate import Accelerator  # type: ignore[import-untyped, unused-ignore]
    from accelerate.state import AcceleratorState  # type: ignore[import-untyped, unused-ignore]
    from accelerate.utils import set_seed  # type: ignore[import-untyped, unused-ignore]

    check_tracker(config)
    if config.log is not None and directory is None:
        raise ValueError(f"log={config.log!r} needs a directory to write to, got None")
    # Blocks are sharded here, on any device: see `shard`.
    os.environ.pop(_FSDP, None)
    # Accelerate keeps the precision of the first run of a process and refuses another.
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        mixed_precision="bf16" if uses_bf16(config) else "no",
        gradient_accumulation_steps=config.accumulation,
        log_with=config.log,
        project_dir=directory,
    )
    if accelerator.num_processes > 1:
        # A process that ends with the group open may abort; another run may still need it.
        atexit.register(accelerator.state.destroy_process_group)
    set_seed(config.seed)
    return accelerator


def wants_shards(config: TrainingConfig) -> bool:
    """Whether a run of several processes is to share out its weights, by config or launcher."""
    return config.shard or os.environ.get(_FSDP, "").lower() in ("1", "true")


def shard(root: nn.Module, model: nn.Module, accelerator: Any) -> None:
    """Deal out the weights of a model to all processes, a block at a time (FSDP2).

    Args:
        root: what is called; weights outside of blocks are together while it runs.
        model: inside of it; its `_no_split_modules` are the blocks.
        accelerator: Accelerate's.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # Of logits that are cut to the classes of a task, and never changed in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    blocks = set(getattr(model, "_no_split_modules", None) or ())
    for module in model.modules():
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh)
    fully_shard(root, mesh=mesh)


def check_tracker(config: TrainingConfig) -> None:
    """Raise unless what a run is to be logged with is installed."""
    if config.log is not None and find_spec(config.log) is None:
        raise ImportError(
            f"log={config.log!r} needs the package {config.log}: pip install {config.log}"
        )


def uses_bf16(config: TrainingConfig) -> bool:
    """Whether a run computes in bfloat16: asked for, or "auto" on a GPU that has it."""
    return config.precision == "bf16" or (
        config.precision == "auto"
        and torch.cuda.is_available()
        and torch.cuda.is_bf16_supported(including_emulation=False)
    )


def total_steps(task: Task, config: TrainingConfig, processes: int) -> int:
    """Optimiser steps of a run."""
    if config.batch_size % (config.accumulation * processes):
        raise ValueError(
            f"batch_size must be a multiple of accumulation times processes = "
            f"{config.accumulation * processes}, got {config.batch_size}"
        )
    if config.steps is not None:
        return config.steps
    size = task.size("train")
    if size is None or config.epochs is None:
        raise ValueError(
            f"steps must be given: the training split of task {task.name!r} has no end, so epochs "
            f"= {config.epochs} says nothing"
        )
    return ceil(size * config.epochs / config.batch_size)


def decays(model: nn.Module) -> dict[str, bool]:
    """For each parameter: whether weight decay may shrink it.

    Matrices that mix features decay. Norms, biases, rates, orders, feature maps and all that routes
    or gates do not: there, zero is one setting among others and not a simpler one. The `gate_proj`
    of a gated MLP is a matrix like any other.
    """
    modules = dict(model.named_modules())
    found = {}
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        routes = any(
            part == "router" or (part.startswith("gate") and part != "gate_proj")
            for part in path.split(".")
        )
        matrix = isinstance(modules[path], _MATRICES) and leaf == "weight" and parameter.ndim > 1
        found[name] = matrix and not routes
    return found


def make_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW over all parameters that learn, in a group that decays and one that does not."""
    may_decay = decays(model)
    learning = [(name, x) for name, x in model.named_parameters() if x.requires_grad]
    if not learning:
        raise ValueError("model must have parameters that require a gradient, got none")
    groups = [
        {
            "params": [x for name, x in learning if may_decay[name] == decay],
            "weight_decay": config.weight_decay if decay else 0.0,
        }
        for decay in (True, False)
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        fused=learning[0][1].is_cuda,
    )


def learning_rate_at(step: int, total: int, config: TrainingConfig) -> float:
    """Linear warm-up, then half a cosine down to the final fraction, reached at the last step.

    >>> config = TrainingConfig(steps=100, learning_rate=1.0, warmup=0.1, final_fraction=0.1)
    >>> [round(learning_rate_at(step, 100, config), 2) for step in (0, 9, 10, 99)]
    [0.1, 1.0, 1.0, 0.1]
    """
    warm = round(config.warmup * total)
    if step < warm:
        return config.learning_rate * (step + 1) / warm
    share = (step - warm) / max(total - 1 - warm, 1)
    low = config.final_fraction
    return config.learning_rate * (low + (1 - low) * 0.5 * (1 + cos(pi * share)))
