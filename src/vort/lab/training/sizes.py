"""A run on a text of one's own: sizes by name, and settings that fit the text and the machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vort.lab.tasks import SPLITS, Books
from vort.lab.training.config import TrainingConfig
from vort.lab.training.forecast import BYTES_PER_PARAMETER

__all__ = ["TEXT_SIZES", "TextSize", "choose_size", "settings_for_text", "weight_decay_for"]

# A token is a byte: what is read of a text over and over teaches less each time, and a model has
# read enough after some twenty tokens for each of its parameters.
_PASSES = 20
_TOKENS_PER_PARAMETER = 20
_FEWEST_STEPS = 150
# A text that is read more often is learnt by heart unless weights decay so fast; one that is read
# six times is learnt worse with it (measured: docs/quick-start.md).
_FEW_PASSES = 10
_DECAY_OF_MANY = 1.0
_SHORTEST = 16


@dataclass(frozen=True)
class TextSize:
    """A model by name: its settings, about how many parameters that is, and how it is trained."""

    parameters: int
    model: Mapping[str, Any]
    length: int
    batch_size: int
    learning_rate: float


def _model(layers: int, width: int, heads: int, **settings: Any) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    return {**sizes, "output_gate": True, **settings}


TEXT_SIZES: dict[str, TextSize] = {
    "tiny": TextSize(260_000, _model(2, 96, 3, sliding_window=64), 256, 8, 5e-3),
    "6m": TextSize(5_900_000, _model(7, 256, 4), 1024, 16, 2e-3),
    "25m": TextSize(26_000_000, _model(8, 512, 8), 2048, 16, 1e-3),
    "125m": TextSize(124_000_000, _model(17, 768, 12), 2048, 32, 6e-4),
}
# The largest that a text of so many bytes is worth, on a GPU.
_WORTH = (("125m", 50_000_000), ("25m", 5_000_000), ("6m", 0))


def choose_size(text: int, device: torch.device, free: int) -> str:
    """The size for a text of so many bytes, on a device with so many bytes free.

    >>> choose_size(10**9, torch.device("cpu"), 10**10)
    'tiny'
    """
    if device.type == "cpu":
        return "tiny"
    for name, least in _WORTH:
        # As much again for what a step keeps, at the least.
        if text >= least and 2 * BYTES_PER_PARAMETER * TEXT_SIZES[name].parameters <= free:
            return name
    return "tiny"


def settings_for_text(task: Books, size: TextSize, given: Mapping[str, Any]) -> dict[str, Any]:
    """Length, batch, steps and looks at validation data for a text; `given` ones are kept.

    Every split must have room for a window or two, so a short text has short windows.
    """
    if given.get("length", _SHORTEST) < _SHORTEST:
        raise ValueError(
            f"--task-set length must be at least {_SHORTEST} for a text, got {given['length']}"
        )
    smallest = min(task.characters(split) for split in SPLITS)
    length = given.get("length", min(size.length, (smallest - 1) // 2))
    if length < _SHORTEST:
        names = {split: f"{task.characters(split):,}" for split in SPLITS}
        parts = ", ".join(f"{count} to {split}" for split, count in names.items())
        raise ValueError(
            f"--text is too short: its bytes are {parts}, and each must have {2 * _SHORTEST + 1}"
        )
    batch_size = given.get("batch_size", size.batch_size)
    read = min(_PASSES * task.characters("train"), _TOKENS_PER_PARAMETER * size.parameters)
    steps = given.get("steps", max(_FEWEST_STEPS, round(read / (batch_size * length))))
    return {
        "length": length,
        "batch_size": batch_size,
        "steps": steps,
        "learning_rate": size.learning_rate,
        "evaluate_every": max(1, steps // 5),
        "evaluation_sequences": 64,
        "test_sequences": 256,
    }


def weight_decay_for(passes: float) -> float:
    """The weight decay for a text that is read so often.

    >>> weight_decay_for(1), weight_decay_for(20)
    (0.1, 1.0)
    """
    return TrainingConfig.weight_decay if passes <= _FEW_PASSES else _DECAY_OF_MANY
