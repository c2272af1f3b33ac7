"""What a run leaves behind."""

from dataclasses import asdict, dataclass, field
from typing import Any

from vort.lab.training.metrics import Metrics

__all__ = ["TrainingResult"]


@dataclass
class TrainingResult:
    """What a run found.

    Attributes:
        steps: optimiser steps taken, those before an interruption included.
        history: loss, learning rate and gradient norm every `log_every` steps, and metrics at each
            look at the validation split.
        validation: metrics by bucket at the end.
        test: the same on the test split; empty if it was not asked for.
        tokens_per_second: speed of training since the last start, evaluation and the first step
            (which compiles and warms up) left out; 0 if there was no other.
        seconds: time of everything, that before an interruption included.
    """

    steps: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    validation: Metrics = field(default_factory=dict)
    test: Metrics = field(default_factory=dict)
    tokens_per_second: float = 0.0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)
