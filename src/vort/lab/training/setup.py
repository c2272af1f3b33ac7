"""Accelerate for a config, and how long a run is."""

import atexit
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Any

import torch

from vort.lab.tasks import Task
from vort.lab.training.config import TrainingConfig

__all__ = ["make_accelerator", "total_steps", "uses_bf16"]


def make_accelerator(config: TrainingConfig, directory: Path | None) -> Any:
    """An `Accelerator` with the precision and trackers of a config, random numbers seeded."""
    from accelerate import Accelerator  # type: ignore[import-untyped, unused-ignore]
    from accelerate.state import AcceleratorState  # type: ignore[import-untyped, unused-ignore]
    from accelerate.utils import set_seed  # type: ignore[import-untyped, unused-ignore]

    if config.log is not None and find_spec(config.log) is None:
        raise ImportError(f"log={config.log!r} needs the package {config.log}: pip install it")
    if config.log is not None and directory is None:
        raise ValueError(f"log={config.log!r} needs a directory to write to, got None")
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
