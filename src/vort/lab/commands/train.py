"""`vort train` and `vort eval`: one model on one task, resumable, and its scores again later."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vort.files import write_atomically
from vort.lab.commands import read_settings

console = Console()


def train(
    task: Annotated[str, typer.Argument(help="zipf_retrieval, label_copy, mqar, books, ...")],
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, settings and result.")],
    steps: Annotated[int | None, typer.Option(help="Optimiser steps.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data, instead.")] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences of a step.")] = 32,
    learning_rate: Annotated[float, typer.Option(help="The highest, after warm-up.")] = 1e-3,
    accumulation: Annotated[int, typer.Option(help="Pieces a batch is split into.")] = 1,
    seed: Annotated[int, typer.Option(help="Of weights and data.")] = 0,
    task_set: Annotated[
        list[str] | None, typer.Option(help="A setting of the task, e.g. length=1000.")
    ] = None,
    model_set: Annotated[
        list[str] | None, typer.Option(help="One of VortConfig, e.g. memory=mixture.")
    ] = None,
    training_set: Annotated[
        list[str] | None, typer.Option(help="One of TrainingConfig, e.g. checkpoint_every=100.")
    ] = None,
    log: Annotated[str | None, typer.Option(help="tensorboard or wandb.")] = None,
    workers: Annotated[int, typer.Option(help="Processes that draw sequences.")] = 0,
    resume: Annotated[bool, typer.Option(help="Go on from the newest checkpoint.")] = False,
) -> None:
    """Train a model; on text it is saved as a Hugging Face model in OUT/model too."""
    from vort.lab.training import train as run_training

    training = {
        "steps": 1000 if steps is None and epochs is None else steps,
        "epochs": epochs,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "accumulation": accumulation,
        "seed": seed,
        "log": log,
        "workers": workers,
        **read_settings(training_set, "--training-set"),
    }
    settings = {
        "task": {"name": task, "seed": seed, **read_settings(task_set, "--task-set")},
        "model": read_settings(model_set, "--model-set"),
        "training": {key: value for key, value in training.items() if value is not None},
    }
    try:
        built, made, config = _build(settings)
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / "run.json", json.dumps(settings, indent=1) + "\n")
        found = run_training(built, made, config, directory=out, resume=resume)
    except (FileExistsError, FloatingPointError, TypeError, ValueError) as problem:
        raise typer.BadParameter(str(problem)) from problem
    except KeyboardInterrupt:
        console.print("stopped; --resume goes on from the newest checkpoint")
        raise typer.Exit(130) from None
    _show(found.test or found.validation, made)
    if made.text:
        from vort.models import ByteTokenizer

        built.save_pretrained(out / "model")
        ByteTokenizer().save_pretrained(out / "model")
        console.print(f"model: [bold]{out / 'model'}[/bold] (for vort generate, vort lens)")
    console.print(f"result: [bold]{out / 'result.json'}[/bold]")


def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder that `vort train` wrote to.")],
    split: Annotated[str, typer.Option(help="test or validation.")] = "test",
    sequences: Annotated[int | None, typer.Option(help="How many; all by default.")] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences at a time.")] = 16,
    task_set: Annotated[
        list[str] | None, typer.Option(help="Another setting of the task, e.g. length=4000.")
    ] = None,
    horizon: Annotated[
        int | None, typer.Option(help="Re-calibrate VORT for lags up to this first.")
    ] = None,
) -> None:
    """Score a trained model, also on longer sequences than it was trained on."""
    from vort.lab.training import evaluate as score
    from vort.lab.training import latest_checkpoint, load_weights

    try:
        settings = json.loads((run / "run.json").read_text())
        settings["task"] |= read_settings(task_set, "--task-set")
        model, task, _ = _build(settings)
        checkpoint = latest_checkpoint(run)
        if checkpoint is None:
            raise FileNotFoundError(f"no checkpoint in {run}: the run has not saved one yet")
        load_weights(checkpoint, model)
        if horizon is not None:
            model.model.set_horizon(horizon)
        found = score(model, task, split, sequences=sequences, batch_size=batch_size)  # type: ignore[arg-type]
    except (OSError, TypeError, ValueError) as problem:
        raise typer.BadParameter(str(problem)) from problem
    _show(found, task)


def _build(settings: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Model, task and training configuration."""
    import vort.lab.experiments  # noqa: F401  # some define tasks of their own
    from vort.lab.experiments.models import build_model
    from vort.lab.tasks import make_task
    from vort.lab.training import TrainingConfig
    from vort.models import VortConfig

    task = make_task(**settings["task"])
    config = TrainingConfig.from_dict(settings["training"])
    # Bytes of text are `ByteTokenizer`'s, with its special tokens: the defaults of `VortConfig`.
    tokens = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
    default = VortConfig()
    text = {name: getattr(default, name) for name in tokens} if task.text else {}
    return build_model(task, {**text, **settings["model"]}, config.seed), task, config


def _show(metrics: Any, task: Any) -> None:
    """A table of scores by bucket."""
    from vort.lab.report.tables import Sheet

    rows = [
        [name, f"{100 * found['accuracy']:.1f}", f"{found['bits']:.3f}", f"{found['count']:,.0f}"]
        for name, found in metrics.items()
    ]
    headings = ("lag or position", "accuracy (%)", "bits", "asked")
    console.print(Sheet(task.name, headings, rows).to_rich())
