"""A run in progress: its steps recorded, scored, shown and saved, and what it leaves behind."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from vort.files import write_atomically
from vort.lab.tasks import Split, Task
from vort.lab.training.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from vort.lab.training.config import TrainingConfig
from vort.lab.training.data import Pieces, load
from vort.lab.training.metrics import Metrics, evaluate
from vort.lab.training.scorer import Objective, Scorer
from vort.lab.training.setup import make_accelerator, make_optimizer, total_steps

__all__ = ["Run", "TrainingResult"]


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


class Run:
    """Model, optimiser and data of a run, ready for its next step.

    Attributes:
        accelerator: Accelerate's.
        scorer: the model behind `Scorer`, prepared for the device or devices.
        optimizer: prepared likewise.
        total: steps of the whole run.
        result: what is known so far.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        config: TrainingConfig,
        directory: str | Path | None,
        objective: Objective | None = None,
    ) -> None:
        self.task, self.config = task, config
        self.directory = None if directory is None else Path(directory)
        self.accelerator = make_accelerator(config, self.directory)
        self.total = total_steps(task, config, self.accelerator.num_processes)
        self.model = model.to(self.accelerator.device)
        self.plain_optimizer = make_optimizer(self.model, config)
        scorer = Scorer(self.model, task.num_classes, objective)
        self.scorer, self.optimizer = self.accelerator.prepare(scorer, self.plain_optimizer)
        self.result = TrainingResult()

    def start(self, resume: bool) -> None:
        """Take up the newest checkpoint, or begin."""
        found = None if self.directory is None else latest_checkpoint(self.directory)
        if found is not None and not resume:
            raise FileExistsError(
                f"directory {str(self.directory)!r} holds a run already ({found.name}): "
                "give resume=True or another directory"
            )
        self.scorer.train()
        pending: list[float] = []
        if found is not None:
            self._check_same(json.loads((found / "state.json").read_text()))
            state = load_checkpoint(found, self.model, self.plain_optimizer)
            self.result = TrainingResult(**{**state["result"], "tokens_per_second": 0.0})
            pending = state["pending"]
        config, tokens = self.config, self.config.batch_size * self.task.length
        tracked = config.log is not None
        self.recorder = Recorder(self.accelerator, self.result, tokens=tokens, tracked=tracked)
        self.recorder.pending = pending
        if tracked:
            settings = {**config.to_dict(), **self.task.describe()}
            self.accelerator.init_trackers("vort", {k: str(v) for k, v in settings.items()})
        self._began = perf_counter()

    def _check_same(self, state: dict[str, Any]) -> None:
        """Refuse to go on with other settings than the run began with."""
        for name, now in (("config", self.config.outcome()), ("task", self.task.describe())):
            before, now = state[name], json.loads(json.dumps(now))
            for key in sorted(before.keys() | now.keys()):
                if before.get(key) != now.get(key):
                    raise ValueError(
                        f"{name}.{key} must be {before.get(key)!r}, as when the run in "
                        f"{str(self.directory)!r} began, got {now.get(key)!r}"
                    )

    @contextmanager
    def bar(self) -> Iterator[Callable[[], None]]:
        """What to call after each step: it shows steps, tokens/s, time left and loss, if wanted."""
        if not (self.config.progress and self.accelerator.is_main_process):
            yield lambda: None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as TimeLeft

        speed, loss = TextColumn("{task.fields[speed]}"), TextColumn("{task.fields[loss]}")
        name = TextColumn("{task.description}")
        columns = (name, BarColumn(), MofNCompleteColumn(), speed, TimeLeft(), loss)
        with Progress(*columns) as display:
            done = self.result.steps
            row = display.add_task("training", total=self.total, completed=done, speed="", loss="")

            def update() -> None:
                last, rate = self.recorder.last_loss, self.result.tokens_per_second
                display.update(
                    row,
                    completed=self.result.steps,
                    speed=f"{rate:,.0f} tokens/s" if rate else "",
                    loss="" if last is None else f"loss {last:.4f}",
                )

            yield update

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """Compact batches of all steps to come: the pieces that fall to this process."""
        config = self.config
        pieces = Pieces(
            self.result.steps,
            self.total,
            config.batch_size,
            self.task.size("train"),
            config.seed,
            config.accumulation,
            self.accelerator.num_processes,
            self.accelerator.process_index,
        )
        return load(self.task, "train", pieces, self.accelerator.device, config.workers)

    def after_step(self, step: int, loss: Tensor, norm: Tensor, rate: float) -> None:
        """Record, evaluate and save, each when it is due."""
        config, last = self.config, step == self.total
        looks = config.evaluate_every is not None and step % config.evaluate_every == 0
        saves = config.checkpoint_every is not None and step % config.checkpoint_every == 0
        logs = step % config.log_every == 0
        self.result.steps = step
        self.recorder.add(loss, norm)
        # Nothing is saved before it is known to be finite.
        if logs or looks or saves or last or not self.recorder.warm:
            self.recorder.read(step, rate)
        if logs or last:
            self.recorder.record_losses(step)
        if looks and not last:
            self.recorder.record(step, {"validation": self._evaluate("validation")})
        if saves or last:
            self._save()
        if looks or saves:
            self.recorder.rest()

    def finish(self) -> TrainingResult:
        """Score the end of the run."""
        if self.accelerator.unwrap_model(self.scorer).gives_logits:
            self.result.validation = self._evaluate("validation")
            if self.config.test_sequences != 0:
                self.result.test = self._evaluate("test")
        self._count_seconds()
        if self.directory is not None and self.accelerator.is_main_process:
            self.directory.mkdir(parents=True, exist_ok=True)
            text = json.dumps(self.result.to_dict(), indent=1)
            write_atomically(self.directory / "result.json", text)
        if self.config.log is not None:
            self.accelerator.end_training()
        return self.result

    def _evaluate(self, split: Split) -> Metrics:
        config = self.config
        pieces = config.accumulation * self.accelerator.num_processes
        return evaluate(
            # Unwrapped: processes may have unequal shares, and a wrapper would wait for all.
            self.accelerator.unwrap_model(self.scorer),
            self.task,
            split,
            sequences=config.test_sequences if split == "test" else config.evaluation_sequences,
            batch_size=config.evaluation_batch_size or config.batch_size // pieces,
            workers=config.workers,
            accelerator=self.accelerator,
        )

    def _save(self) -> None:
        self._count_seconds()
        if self.directory is not None and self.accelerator.is_main_process:
            state = {
                "config": self.config.outcome(),
                "task": self.task.describe(),
                "result": self.result.to_dict(),
                "pending": self.recorder.pending,
            }
            parts = (self.directory, self.result.steps, self.model, self.plain_optimizer, state)
            save_checkpoint(*parts, keep=self.config.keep_checkpoints)
        self.accelerator.wait_for_everyone()

    def _count_seconds(self) -> None:
        now = perf_counter()
        self.result.seconds += now - self._began
        self._began = now
