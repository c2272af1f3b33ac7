"""What a run will take, said before it starts: memory and time, from a trial on a few tokens."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from vort.lab.launcher import processes
from vort.lab.tasks import Task
from vort.lab.training.config import TrainingConfig
from vort.lab.training.data import compact
from vort.lab.training.peers import training_device
from vort.lab.training.scorer import Scorer
from vort.lab.training.setup import total_steps, uses_bf16

__all__ = ["Forecast", "device_in_words", "forecast", "free_memory"]

# Weights, gradients and AdamW's two moments, in float32.
BYTES_PER_PARAMETER = 16
# What a backward pass keeps besides what it was given to keep: measured at 1.2 to 1.7 times that,
# 1.7 where a step is so small that it does not matter.
_SLACK = 1.5
_TRIAL = 256  # tokens
_PATIENCE = 5.0  # seconds that a step on trial may take


@dataclass(frozen=True)
class Forecast:
    """What a run is expected to take.

    Attributes:
        parameters: of the model.
        weights: bytes that do not depend on the batch.
        activations: bytes for each sequence of a piece of a batch.
        free: bytes that the device has.
        seconds: of a step.
        steps: of the whole run.
        evaluation: seconds of all looks at validation and test data.
        processes: that share a batch.
    """

    parameters: int
    weights: int
    activations: int
    free: int
    seconds: float
    steps: int
    evaluation: float
    processes: int = 1

    def memory(self, sequences: int) -> int:
        """Bytes of a run whose pieces have so many sequences."""
        return self.weights + sequences * self.activations

    def fits(self, sequences: int) -> bool:
        """Whether there is room for it, and some to spare."""
        return self.memory(sequences) <= 0.9 * self.free

    def accumulation(self, batch_size: int, least: int = 1) -> int | None:
        """The fewest pieces of a batch, `least` or more, that fit one by one; None if none do."""
        each = batch_size // self.processes
        divisors = (n for n in range(least, each + 1) if each % n == 0)
        return next((n for n in divisors if self.fits(each // n)), None)

    def time(self, steps: int) -> float:
        """Seconds of so many steps and of all looks at other data."""
        return steps * self.seconds + self.evaluation * steps / max(self.steps, 1)


def device_in_words(device: torch.device) -> str:
    """What it is called and how much of it there is."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} threads" if device.type == "cpu" else device.type


def free_memory(device: torch.device) -> int:
    """Bytes that a new tensor can have there; a limit on this process's group counts."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil  # type: ignore[import-untyped, unused-ignore]  # Accelerate needs it too

    free = int(psutil.virtual_memory().available)
    root = Path("/sys/fs/cgroup")
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            most, used = int((root / limit).read_text()), int((root / usage).read_text())
            table = ((root / limit).parent / "memory.stat").read_text().splitlines()
        except (OSError, ValueError):  # no such group, or "max": no limit
            continue
        counts = dict(line.split() for line in table)
        # Pages of files go when room is needed.
        cached = int(counts.get("file", counts.get("cache", 0)))
        free = min(free, most - used + cached)
    return max(free, 0)


def forecast(model: nn.Module, task: Task, config: TrainingConfig) -> Forecast:
    """Measure a pass or two of a model, which is moved to where it will be trained.

    First a few tokens, whose tensors are counted; then, if that promises to fit and to be quick,
    a piece of a batch, or one sequence of it. Weights stay as they are.
    """
    device = training_device()
    model.to(device)
    parameters = sum(x.numel() for x in model.parameters())
    scorer, mixed = Scorer(model, task.num_classes).train(), uses_bf16(config)
    per_sequence, seconds = _trial(scorer, task, device, mixed)
    found = Forecast(
        parameters=parameters,
        # The weights are there already.
        weights=(BYTES_PER_PARAMETER - 4) * parameters,
        activations=per_sequence,
        free=free_memory(device),
        seconds=seconds * config.batch_size / processes(),
        steps=total_steps(task, config, processes()),
        evaluation=0.0,
        processes=processes(),
    )
    pieces = found.accumulation(config.batch_size, config.accumulation)
    if pieces is not None:
        piece = config.batch_size // (pieces * processes())
        seconds = _per_sequence(scorer, task, device, mixed, seconds, piece)
        found = replace(found, seconds=seconds * piece * pieces)
    asked = _sequences(task, config)
    # A pass forward is a third of one forward and back.
    share = found.seconds / config.batch_size / 3
    return replace(found, evaluation=asked * share)


def _per_sequence(
    scorer: Scorer, task: Task, device: torch.device, mixed: bool, seconds: float, piece: int
) -> float:
    """Seconds of a sequence within a piece of a batch, from what a few tokens make of it.

    A GPU is told what to do in the same time for a few tokens as for many, so that those promise
    far too little speed: where a piece seems to take too long, one whole sequence is asked first.
    """
    for sequences in (piece, 1, piece):
        if seconds * sequences <= _PATIENCE:
            batch = _on(device, compact(task.batch("train", range(sequences))))
            seconds = _pass(scorer, batch, mixed) / sequences
            if sequences == piece:
                break
    return seconds


def _trial(scorer: Scorer, task: Task, device: torch.device, mixed: bool) -> tuple[int, float]:
    """Bytes and seconds of a sequence, from two short ones: bytes as a T + b T², b >= 0."""
    batch = _on(device, compact(task.batch("train", [0])))
    sizes = []
    longest = min(_TRIAL, task.length)
    seconds = 0.0
    for length in (max(longest // 2, 1), longest):
        part = _first(batch, length)
        sizes.append((length, _kept(scorer, part, mixed)))
        seconds = _pass(scorer, part, mixed)
    (half, low), (whole, high) = sizes
    curve = max((high / whole - low / half) / (whole - half), 0.0) if whole > half else 0.0
    slope = high / whole - curve * whole
    length = task.length
    return round(_SLACK * (slope * length + curve * length**2)), seconds / whole * length


def _kept(scorer: Scorer, batch: dict[str, Tensor], mixed: bool) -> int:
    """Bytes of all that a pass forward keeps for the way back, weights apart."""
    own = {x.untyped_storage().data_ptr() for x in scorer.parameters()}
    sizes: dict[int, int] = {}
    alive: list[Tensor] = []  # lest an address be used twice

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
            alive.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        _loss(scorer, batch, mixed)
    return sum(sizes.values())


def _pass(scorer: Scorer, batch: dict[str, Tensor], mixed: bool) -> float:
    """Seconds of a pass forward and back, after one that warms up."""
    for _ in range(2):
        began = perf_counter()
        _loss(scorer, batch, mixed).backward()
        scorer.zero_grad(set_to_none=True)
        if batch["input_ids"].is_cuda:
            torch.cuda.synchronize()
        seconds = perf_counter() - began
    return seconds


def _loss(scorer: Scorer, batch: dict[str, Tensor], mixed: bool) -> Tensor:
    kind = batch["input_ids"].device.type
    precision: Any = torch.autocast(kind, torch.bfloat16) if mixed else nullcontext()
    with precision:
        loss: Tensor = scorer(batch)["loss"]
    return loss


def _first(batch: dict[str, Tensor], length: int) -> dict[str, Tensor]:
    """The first positions of a single sequence, all of them asked for something."""
    found = {name: x[:, :length] for name, x in batch.items() if x.ndim == 2}
    positions = torch.arange(length, device=batch["positions"].device)
    return {**found, "positions": positions, "targets": torch.zeros_like(positions)}


def _on(device: torch.device, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.to(device) for name, x in batch.items()}


def _sequences(task: Task, config: TrainingConfig) -> int:
    """How many sequences are scored on the way and at the end."""
    sizes: dict[str, int] = {}
    for split, most in (
        ("validation", config.evaluation_sequences),
        ("test", config.test_sequences),
    ):
        size = task.size(split)  # type: ignore[arg-type]
        sizes[split] = min(x for x in (size, most) if x is not None)
    looks = 1
    if config.evaluate_every is not None:
        looks += (total_steps(task, config, 1) - 1) // config.evaluate_every
    return looks * sizes["validation"] + sizes["test"]
