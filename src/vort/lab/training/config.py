"""Every knob of a training run."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from vort.names import check_choice, refuse_unknown, typed

__all__ = ["TrainingConfig", "check_ranges"]

# How a run is shown and fed; what comes out of it does not depend on these.
_APPEARANCE = {"log", "log_every", "progress", "workers", "record_steps", "shard"}
_APPEARANCE |= {"checkpoint_every", "checkpoint_minutes", "keep_checkpoints"}

_AT_LEAST_ONE = (
    *("steps", "epochs", "batch_size", "accumulation", "log_every", "evaluate_every"),
    *("evaluation_sequences", "evaluation_batch_size", "checkpoint_every", "keep_checkpoints"),
)
_AT_LEAST_ZERO = ("workers", "test_sequences", "weight_decay", "eps")
# The largest seed is that of numpy, which is seeded with torch.
_MOST = {"seed": 2**32 - 1, "final_fraction": 1, "warmup": 1}
_POSITIVE = ("learning_rate", "clip_norm", "checkpoint_minutes")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Settings of `train`; the same for every model that is to be compared.

    Args:
        steps: optimiser steps; give this or epochs.
        epochs: passes over the training split, where that has an end.
        batch_size: sequences of one step, over all processes and accumulated pieces.
        accumulation: pieces that a batch is split into, one after another, to save memory.
        learning_rate: the highest, after warm-up.
        final_fraction: learning rate at the end, as a share of the highest.
        warmup: share of the steps in which the learning rate rises.
        weight_decay: of matrices; norms, biases, gates and routers have none.
        betas: of AdamW.
        eps: of AdamW.
        clip_norm: largest norm of the gradient; None: no limit.
        precision: "auto" (bf16 on a GPU that has it, else float32), "bf16" or "float32".
        seed: of the order of sequences and of dropout.
        evaluate_every: steps between looks at the validation split; None: at the end alone.
        evaluation_sequences: sequences in such a look, and the most that the last one takes of the
            validation split; None: all.
        test_sequences: sequences of the test split to score at the end; None: all; 0: none.
        evaluation_batch_size: sequences at a time there; None: as many as a piece of a batch.
        checkpoint_every: steps between checkpoints; None: as minutes go by, and at the end.
        checkpoint_minutes: minutes after which there is a checkpoint in any case; None: never.
        keep_checkpoints: how many to keep.
        log: "tensorboard" or "wandb", through Accelerate; None: neither.
        log_every: steps between records of loss, and between checks that it is finite.
        progress: show a bar, or a line every few seconds where that cannot be drawn.
        workers: processes that draw sequences; 0: none but this one. Sequences of a training split
            of up to 10^8 tokens that a GPU keeps are drawn once, by this one.
        shard: where several processes train, whether each keeps a part of weights, gradients and
            moments (FSDP2, a block at a time) instead of all of them.
        record_steps: on one GPU, without accumulation, launch a step once and replay it from then
            on (`vort.models.RecordedStep`): it pays where launching a step takes longer than
            computing it, as with small batches.

    >>> TrainingConfig(steps=100, batch_size=8).learning_rate
    0.0003
    """

    steps: int | None = None
    epochs: int | None = None
    batch_size: int = 32
    accumulation: int = 1
    learning_rate: float = 3e-4
    final_fraction: float = 0.1
    warmup: float = 0.05
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip_norm: float | None = 1.0
    precision: Literal["auto", "bf16", "float32"] = "auto"
    seed: int = 0
    evaluate_every: int | None = None
    evaluation_sequences: int | None = 100
    test_sequences: int | None = None
    evaluation_batch_size: int | None = None
    checkpoint_every: int | None = None
    checkpoint_minutes: float | None = 10.0
    keep_checkpoints: int = 1
    log: Literal["tensorboard", "wandb"] | None = None
    log_every: int = 10
    progress: bool = True
    workers: int = 0
    shard: bool = False
    record_steps: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(
                f"give exactly one of steps and epochs, got steps={self.steps} and "
                f"epochs={self.epochs}"
            )
        check_ranges(vars(self))
        check_choice("precision", self.precision, ("auto", "bf16", "float32"))
        if self.log is not None:
            check_choice("log", self.log, ("tensorboard", "wandb"))
        if self.batch_size % self.accumulation:
            raise ValueError(
                f"accumulation must divide batch_size = {self.batch_size}, got {self.accumulation}"
            )

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "TrainingConfig":
        """A config from JSON or a command line; unknown keys are an error."""
        refuse_unknown("TrainingConfig", settings, [field.name for field in fields(cls)])
        return cls(**typed(cls, settings))

    def to_dict(self) -> dict[str, Any]:
        """Every setting, ready for JSON."""
        return {**asdict(self), "betas": list(self.betas)}

    def outcome(self) -> dict[str, Any]:
        """The settings that decide what comes out: a run is resumed with the same ones only."""
        return {key: value for key, value in self.to_dict().items() if key not in _APPEARANCE}


def check_ranges(settings: Mapping[str, Any]) -> None:
    """Raise at the first number that `TrainingConfig` has no use for; not all need be given.

    >>> check_ranges({"steps": 0})
    Traceback (most recent call last):
    ValueError: steps must be at least 1, got 0
    """
    for name, value in settings.items():
        if value is None:
            continue
        least = int(name in _AT_LEAST_ONE)
        if name in _AT_LEAST_ONE + _AT_LEAST_ZERO and not least <= value < float("inf"):
            limit = "" if value < least else " and finite"
            raise ValueError(f"{name} must be at least {least}{limit}, got {value}")
        if name == "betas" and not (len(value) == 2 and all(0 <= x < 1 for x in value)):
            raise ValueError(f"betas must be two numbers in [0, 1), got {value}")
        if name in _MOST and not 0 <= value <= _MOST[name]:
            raise ValueError(f"{name} must lie in [0, {_MOST[name]}], got {value}")
        if name in _POSITIVE and not 0 < value < float("inf"):
            raise ValueError(f"{name} must be positive and finite, got {value}")
