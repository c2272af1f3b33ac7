"""A run in progress: what the loop needs around its steps."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from vort.lab.tasks import Split, Task
from vort.lab.training.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from vort.lab.training.config import TrainingConfig
from vort.lab.training.data import Pieces, load
from vort.lab.training.evaluation import evaluate
from vort.lab.training.metrics import Metrics
from vort.lab.training.optimization import make_optimizer
from vort.lab.training.progress import Bar, progress_bar
from vort.lab.training.recorder import Recorder
from vort.lab.training.result import TrainingResult
from vort.lab.training.scoring import Objective, Scorer
from vort.lab.training.setup import make_accelerator, total_steps

__all__ = ["Run"]


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
    def bar(self) -> Iterator[Bar]:
        """What is shown while the run runs."""
        with progress_bar(self.config.progress and self.accelerator.is_main_process) as display:
            yield Bar(display, self.total, self.result.steps)

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
            path = self.directory / "result.json"
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(self.result.to_dict(), indent=1))
            partial.replace(path)
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
