"""A run in progress: its steps recorded, scored, shown and saved, and what it leaves behind."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from vort.files import write_atomically
from vort.lab.tasks import Split, Task
from vort.lab.training.checkpoint import (
    latest_checkpoint,
    load_checkpoint,
    read_state,
    save_checkpoint,
)
from vort.lab.training.config import TrainingConfig
from vort.lab.training.data import Pieces, load
from vort.lab.training.metrics import Metrics, evaluate
from vort.lab.training.progress import EVERY, Standing, shown
from vort.lab.training.scorer import Objective, Scorer
from vort.lab.training.setup import (
    make_accelerator,
    make_optimizer,
    shard,
    total_steps,
    wants_shards,
)

__all__ = ["Run", "Stopped", "TrainingResult"]

# What Hugging Face writes into a config beside the settings of a model.
_BOOKKEEPING = {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"}


class Stopped(KeyboardInterrupt):
    """A run that was interrupted, or whose time was over, and saved where it was.

    Attributes:
        step: steps done.
        total: of how many.
        checkpoint: where they are.
        interrupted: by somebody; else the time that it was given is over.
    """

    def __init__(self, step: int, total: int, checkpoint: Path, interrupted: bool = True) -> None:
        super().__init__(f"stopped at step {step} of {total}, saved in {checkpoint}")
        self.step, self.total, self.checkpoint = step, total, checkpoint
        self.interrupted = interrupted


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

    @property
    def age(self) -> float:
        """Seconds since the last reading, or the last rest."""
        return float("inf") if self._mark is None else perf_counter() - self._mark

    def add(self, loss: Tensor, norm: Tensor) -> None:
        """Take the mean loss and the gradient norm of the next step."""
        self._unread.append((loss.float(), norm.float()))

    def read(self, step: int, rate: float) -> None:
        """Fetch what the steps since the last reading, up to `step`, say; raise if one broke down.

        rate: the learning rate of the last.
        """
        rows = torch.stack([torch.stack(pair) for pair in self._unread])
        everyone = self.accelerator.gather(rows[None])  # [processes, steps, 2]
        values = (rows if len(everyone) == 1 else everyone.mean(0)).tolist()
        now = perf_counter()
        for number, (loss, norm) in enumerate(values, step - len(values) + 1):
            if not isfinite(loss) or not isfinite(norm):
                here = everyone[:, number - 1 - step, 0].tolist()
                ranks = [rank for rank, x in enumerate(here) if not isfinite(x)]
                where = f" on rank {ranks[0]} of {len(here)}" if ranks and len(here) > 1 else ""
                raise FloatingPointError(
                    f"training broke down at step {number}{where}: loss {loss:g}, norm of the "
                    f"gradient "
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
        recorded: loss and gradients of a batch as one recording; None where there can be none.
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
        seconds: float | None = None,
    ) -> None:
        self._ends = float("inf") if seconds is None else perf_counter() + seconds
        self.task, self.config = task, config
        self.directory = None if directory is None else Path(directory)
        sharded = wants_shards(config)
        self.accelerator = make_accelerator(config, self.directory)
        self.total = total_steps(task, config, self.accelerator.num_processes)
        self.model = model.to(self.accelerator.device)
        scorer: Any = Scorer(self.model, task.num_classes, objective)
        self.sharded = sharded and self.accelerator.num_processes > 1
        if self.sharded:
            shard(scorer, self.model, self.accelerator)
        self.plain_optimizer = make_optimizer(self.model, config)
        if self.sharded:
            self.optimizer = self.accelerator.prepare(self.plain_optimizer)
            self.scorer = scorer
        else:
            self.scorer, self.optimizer = self.accelerator.prepare(scorer, self.plain_optimizer)
        alone = self.accelerator.num_processes == 1 and config.accumulation == 1
        on_gpu = self.accelerator.device.type == "cuda" and objective is None
        self.recorded = self._recorded() if alone and on_gpu and config.record_steps else None
        self.result = TrainingResult()
        self._asked_to_stop = False

    def _recorded(self) -> Callable[[dict[str, Tensor]], Tensor] | None:
        from vort.models.training import RecordedStep

        return RecordedStep(self.model, lambda batch: self.scorer(batch)["loss"])

    def shares(self, pieces: Sequence[dict[str, Tensor]]) -> list[Any]:
        """What each piece of a step weighs: as many labels as it has, 1 where all have as many.

        The mean over pieces and processes is then that over the labels of the whole batch.
        """
        counts, processes = [len(x["targets"]) for x in pieces], self.accelerator.num_processes
        if processes == 1 and len({*counts}) == 1:
            return [1.0] * len(counts)
        total = torch.tensor(float(sum(counts)), device=self.accelerator.device)
        mean = self.accelerator.reduce(total, "sum").clamp(min=1) / (len(counts) * processes)
        return [count / mean for count in counts]

    def backward(self, batch: dict[str, Tensor], share: Any = 1.0) -> Tensor:
        """The loss of a piece of a batch, detached; its gradients are added to the model's.

        share: what it weighs where it is a mean over labels; see `shares`.
        """
        # Packed rows hold another number of sequences every time.
        if self.recorded is not None and "position_ids" not in batch:
            return self.recorded(batch)
        with self.precision():
            scores = self.scorer(batch)
        loss: Tensor = scores["loss"] * share if "logits" in scores else scores["loss"]
        self.accelerator.backward(loss)
        return loss.detach()

    def precision(self) -> Any:
        """The context that the model is to be called in; Accelerate's own models bring theirs."""
        return self.accelerator.autocast() if self.sharded else nullcontext()

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
            self._check_same(read_state(found))
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
        self._began = self._saved_at = perf_counter()

    def _check_same(self, state: dict[str, Any]) -> None:
        """Refuse to go on with other settings than the run began with."""
        model = _model_settings(self.model)
        for name, now in (
            ("config", self.config.outcome()),
            ("task", self.task.describe()),
            # Of a model only what both know: another version may have settings of its own.
            ("model", {key: model[key] for key in model.keys() & state.get("model", {}).keys()}),
        ):
            before, now = state.get(name, {}), json.loads(json.dumps(now))
            if name == "model":
                before = {key: before[key] for key in now}
            for key in sorted(before.keys() | now.keys()):
                if before.get(key) != now.get(key):
                    raise ValueError(
                        f"{name}.{key} must be {before.get(key)!r}, as when the run in "
                        f"{str(self.directory)!r} began, got {now.get(key)!r}"
                    )

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Show how the run goes, and take an interrupt as a wish: the step under way is finished.

        The wish is granted where the run can be saved and is alone: processes would not stop at
        the same step.
        """
        wanted = self.config.progress and self.accelerator.is_main_process
        with shown(wanted, self.total) as self.display, self._interrupts():
            yield

    @contextmanager
    def _interrupts(self) -> Iterator[None]:
        alone = self.accelerator.num_processes == 1 and self.directory is not None
        if not alone or threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(number: int, frame: object) -> None:
            mine = os.getpid() == owner  # those that draw sequences get signals too
            if not mine and number == signal.SIGTERM:
                os._exit(128 + number)
            if self._asked_to_stop:
                raise KeyboardInterrupt
            self._asked_to_stop = True
            if mine:
                os.write(2, b"\nstopping after this step; once more stops at once\n")

        owner = os.getpid()
        former = {each: signal.signal(each, ask) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in former.items():
                signal.signal(each, handler)

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
        device, filled = self.accelerator.device, self.recorded is not None
        return load(self.task, "train", pieces, device, config.workers, filled)

    def after_step(self, step: int, loss: Tensor, norm: Tensor, rate: float) -> None:
        """Record, evaluate and save, each when it is due."""
        config, last = self.config, step == self.total
        looks = config.evaluate_every is not None and step % config.evaluate_every == 0
        logs = step % config.log_every == 0
        saves = config.checkpoint_every is not None and step % config.checkpoint_every == 0
        over = self._is_over(logs) and not last
        saves = saves or last or self._is_late(logs) or self._asked_to_stop or over
        alone = self.accelerator.num_processes == 1
        shows = config.progress and alone and self.recorder.age >= EVERY
        self.result.steps = step
        self.recorder.add(loss, norm)
        # Nothing is saved before it is known to be finite.
        if logs or looks or saves or shows or not self.recorder.warm:
            self.recorder.read(step, rate)
        if logs or last:
            self.recorder.record_losses(step)
        self._show()
        if looks and not last:
            found = self._evaluate("validation")
            self.recorder.record(step, {"validation": found})
            self.display.say(f"validation at step {step:,}: {found['all']['bits']:.3f} bits")
        if saves:
            self._save()
        if looks or saves:
            self.recorder.rest()
        # A wish that came after saving was decided waits for the next step.
        if saves and (self._asked_to_stop or over) and self.directory is not None:
            place = self.directory / f"step-{step:08d}"
            raise Stopped(step, self.total, place, interrupted=self._asked_to_stop)

    def _is_late(self, logs: bool) -> bool:
        """Whether the last checkpoint was too many minutes ago; processes agree about it."""
        minutes = self.config.checkpoint_minutes
        return minutes is not None and self._has_come(self._saved_at + 60 * minutes, logs)

    def _is_over(self, logs: bool) -> bool:
        """Whether the time of this call is over, where the run can be saved."""
        limited = self._ends < float("inf") and self.directory is not None
        return limited and self._has_come(self._ends, logs)

    def _has_come(self, moment: float, logs: bool) -> bool:
        """Whether it is that late, by this clock or by the mean of all processes'."""
        waited = perf_counter() - moment
        if self.accelerator.num_processes > 1:
            if not logs:  # they would wait for each other at every step
                return False
            here = torch.tensor(waited, device=self.accelerator.device)
            waited = float(self.accelerator.reduce(here, "mean"))
        return waited >= 0

    def _show(self) -> None:
        loss, speed = self.recorder.last_loss, self.result.tokens_per_second
        tokens = self.recorder.tokens
        self.display.show(Standing(self.result.steps, self.total, loss, speed, tokens))

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
        with self.precision():
            return evaluate(
                # Unwrapped: processes may have unequal shares, and a wrapper would wait for all.
                self.accelerator.unwrap_model(self.scorer),
                self.task,
                split,
                sequences=config.test_sequences if split == "test" else config.evaluation_sequences,
                batch_size=config.evaluation_batch_size or config.batch_size // pieces,
                workers=config.workers,
                accelerator=self.accelerator,
                together=self.sharded,
            )

    def _save(self) -> None:
        self._count_seconds()
        if self.directory is not None:
            state = {
                "config": self.config.outcome(),
                "task": self.task.describe(),
                "model": _model_settings(self.model),
                "result": self.result.to_dict(),
                "pending": self.recorder.pending,
            }
            parts = (self.directory, self.result.steps, self.model, self.plain_optimizer, state)
            self._agree(lambda: save_checkpoint(*parts, keep=self.config.keep_checkpoints))
        self._saved_at = perf_counter()

    def _agree(self, save: Callable[[], object]) -> None:
        """Save, in every process if weights are shared out, else in one; all fail if one does."""
        problem: OSError | None = None
        if self.sharded or self.accelerator.is_main_process:
            try:
                save()
            except OSError as found:  # a full disk, most of all
                problem = found
        failed = torch.tensor(float(problem is not None), device=self.accelerator.device)
        if float(self.accelerator.reduce(failed, "sum")):
            raise problem or OSError("another process could not write the checkpoint")

    def _count_seconds(self) -> None:
        now = perf_counter()
        self.result.seconds += now - self._began
        self._began = now


def _model_settings(model: nn.Module) -> dict[str, Any]:
    """Settings of a Hugging Face model, ready for JSON; {} of others."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return {}
    found = {key: x for key, x in config.to_dict().items() if key not in _BOOKKEEPING}
    plain: dict[str, Any] = json.loads(json.dumps(found, default=str))
    return plain
