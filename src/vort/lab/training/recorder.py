"""Losses as they come: checked, averaged, timed and handed to trackers."""

from math import isfinite
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from vort.lab.training.result import TrainingResult

__all__ = ["Recorder"]


class Recorder:
    """Keeps losses on the device until they are read: reading each would make it wait each time.

    Args:
        accelerator: Accelerate's.
        result: where history and speed go.
        tokens: tokens of a step.
        tracked: whether Accelerate has a tracker to log to.

    Attributes:
        last_loss: mean loss since the last record.
        pending: losses since then, one a step.
    """

    def __init__(
        self, accelerator: Any, result: TrainingResult, *, tokens: int, tracked: bool
    ) -> None:
        self.accelerator, self.result = accelerator, result
        self.tokens, self.tracked = tokens, tracked
        self.last_loss: float | None = None
        self.pending: list[float] = []
        self._unread: list[tuple[Tensor, Tensor]] = []
        self._mark: float | None = None
        self._seconds = 0.0
        self._steps = 0
        self._last: dict[str, float] = {}

    @property
    def warm(self) -> bool:
        """Whether a step has been read, so that speed can be measured."""
        return self._mark is not None

    def add(self, loss: Tensor, norm: Tensor) -> None:
        """Take the mean loss and the gradient norm of the next step."""
        self._unread.append((loss.float(), norm.float()))

    def read(self, step: int, rate: float) -> None:
        """Fetch what the steps since the last reading, up to `step`, say; raise if one broke down.

        rate: the learning rate of the last.
        """
        rows = torch.stack([torch.stack(pair) for pair in self._unread])
        rows = self.accelerator.reduce(rows, "mean")
        values = rows.tolist()
        now = perf_counter()
        for number, (loss, norm) in enumerate(values, step - len(values) + 1):
            if not isfinite(loss) or not isfinite(norm):
                raise FloatingPointError(
                    f"training broke down at step {number}: loss {loss:g}, norm of the gradient "
                    f"{norm:g}, learning rate {rate:g}; try a lower learning_rate, a longer warmup "
                    'or precision="float32"'
                )
        if self._mark is not None:
            self._seconds += now - self._mark
            self._steps += len(values)
            self.result.tokens_per_second = self._steps * self.tokens / self._seconds
        self._mark = now
        self._unread.clear()
        self.pending += [loss for loss, _ in values]
        self.last_loss = sum(self.pending) / len(self.pending)
        self._last = {"gradient_norm": values[-1][1], "learning_rate": rate}

    def record_losses(self, step: int) -> None:
        """Add to the history what was read since this was last done."""
        self.record(step, {"loss": self.last_loss, **self._last})
        self.pending.clear()

    def rest(self) -> None:
        """Leave the time since the last reading out of the speed."""
        if self._mark is not None:
            self._mark = perf_counter()

    def record(self, step: int, entry: dict[str, Any]) -> None:
        """Add an entry to the history, and send it to the tracker."""
        self.result.history.append({"step": step, **entry})
        if not self.tracked:
            return
        flat: dict[str, float] = {}
        for key, value in entry.items():
            if isinstance(value, dict):
                for bucket, metrics in value.items():
                    flat |= {f"{key}/{name} {bucket}": x for name, x in metrics.items()}
            else:
                flat[key] = value
        self.accelerator.log(flat, step=step)
