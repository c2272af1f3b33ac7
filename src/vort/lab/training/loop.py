"""The training loop: one for all models and tasks."""

from pathlib import Path

import torch
from torch import nn

from vort.lab.tasks import Task
from vort.lab.training.config import TrainingConfig
from vort.lab.training.lock import hold
from vort.lab.training.run import Run, TrainingResult
from vort.lab.training.scorer import Objective
from vort.lab.training.setup import learning_rate_at

__all__ = ["train"]


def train(
    model: nn.Module,
    task: Task,
    config: TrainingConfig,
    *,
    directory: str | Path | None = None,
    resume: bool = False,
    objective: Objective | None = None,
    seconds: float | None = None,
) -> TrainingResult:
    """Train a model in place; metrics by bucket on the validation and test splits.

    Args:
        model: any module that returns logits `[B, T, V]` for `input_ids`, or a loss; see `Scorer`.
        task: what to learn.
        config: how.
        directory: where checkpoints, the result and what trackers write go; None: nowhere.
            One run at a time is in it. An interrupt (Ctrl-C, or SIGTERM) ends the step, saves and
            raises `Stopped`, a KeyboardInterrupt.
        resume: go on from the newest checkpoint in `directory`, if there is one. On a CPU the
            outcome is that of a run without interruption, to the bit.
        objective: a loss of your own, from the model and a compact batch (see `compact`); by
            default the mean cross-entropy at labelled positions. Pieces of an accumulated batch
            count alike.
        seconds: after so many the step under way is finished, saved and `Stopped` raised, as by an
            interrupt; None: only the last step ends the run. It needs a directory.

    >>> from vort.lab.tasks import ZipfRetrieval
    >>> task = ZipfRetrieval(length=64, pairs=4, keys=8)
    >>> model = nn.Sequential(nn.Embedding(task.vocab_size, 8), nn.Linear(8, task.num_classes))
    >>> config = TrainingConfig(steps=2, batch_size=4, test_sequences=10, progress=False)
    >>> sorted(train(model, task, config).test)
    ['<=100', 'all']
    """
    if seconds is not None and directory is None:
        raise ValueError(f"seconds={seconds:g} needs a directory to save to, got None")
    with hold(directory):
        return _train(Run(model, task, config, directory, objective, seconds), resume)


def _train(run: Run, resume: bool) -> TrainingResult:
    config = run.config
    run.start(resume)
    limit = float("inf") if config.clip_norm is None else config.clip_norm
    accelerator, optimizer = run.accelerator, run.optimizer
    with run.watched():
        batches = run.batches()
        for step in range(run.result.steps, run.total):
            rate = learning_rate_at(step, run.total, config)
            for group in optimizer.param_groups:
                group["lr"] = rate
            mean = norm = torch.zeros((), device=accelerator.device)
            pieces = [next(batches) for _ in range(config.accumulation)]
            for batch, share in zip(pieces, run.shares(pieces), strict=True):
                with accelerator.accumulate(run.scorer):
                    loss = run.backward(batch, share)
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(run.model.parameters(), limit)
                        norm = norm.full_tensor() if run.sharded else norm
                    optimizer.step()
                    optimizer.zero_grad()
                mean = mean + loss / config.accumulation
            run.after_step(step + 1, mean, norm, rate)
    return run.finish()
