"""`vort train`: one model on one task or text, resumable."""

import shlex
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.console import Console

from vort.lab.commands import quiet_libraries, read_minutes, read_settings, say, say_horizon
from vort.lab.commands.settings import FILE, RunSettings
from vort.lab.launcher import rank

# Where several processes train together, one speaks.
console = Console(quiet=rank() != 0)

# Of a task that is no text of one's own.
_DEFAULTS = {"steps": 1000, "batch_size": 32, "learning_rate": 1e-3, "seed": 0}
# The most that is read of a data set, which may have no end.
_MOST_BYTES = 2**28
# A step of more pieces is a slip: it takes hours, and nothing stops or saves on its way.
_MOST_PIECES = 1024


def train(
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, settings, result, model.")],
    task: Annotated[
        str | None,
        typer.Argument(help="mqar, multi_needle, ruler, scan, babi, books, ...; not with --text."),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(help="A text of your own: a file, a folder, or a data set OWNER/NAME."),
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="tiny, 6m, 25m or 125m; for --text, by machine if absent.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Optimiser steps; by size and text, or 1000, if absent.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data, instead.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Sequences of a step.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="The highest, after warm-up.")] = None,
    accumulation: Annotated[
        int | None, typer.Option(help="Pieces a batch is split into, to save memory.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights and data; 0 if absent.")] = None,
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
    workers: Annotated[int | None, typer.Option(help="Processes that draw sequences.")] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Save and stop after so many; --resume goes on.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in OUT; it knows its settings.")
    ] = False,
) -> None:
    """Train a model on a text of your own (--text) or on a task, and say first what it takes.

    Ctrl-C (or SIGTERM) saves and stops; `vort train --out OUT --resume` goes on. A model of text
    ends up in OUT/model, for `vort generate OUT`, `vort lens OUT` and from_pretrained.
    """
    from vort.lab.training import Stopped, TrainingConfig, latest_checkpoint
    from vort.lab.training.config import check_ranges
    from vort.lab.training.lock import hold
    from vort.lab.training.peers import watching
    from vort.models import VortConfig

    limit = read_minutes(minutes)
    ends = None if limit is None else perf_counter() + limit
    options: dict[str, Any] = {"steps": steps, "epochs": epochs, "batch_size": batch_size}
    options |= {"learning_rate": learning_rate, "accumulation": accumulation, "seed": seed}
    options |= {"log": log, "workers": workers}
    options = {key: value for key, value in options.items() if value is not None}
    more = _typed(TrainingConfig, training_set, "--training-set")
    spelled = {key: f"--{key.replace('_', '-')}" for key in options}
    options = _together(options, spelled, more, "--training-set")
    check_ranges(options)
    given = RunSettings(
        task=_task_of(task, text, seed, read_settings(task_set, "--task-set")),
        model=_typed(VortConfig, model_set, "--model-set"),
        training={key: value for key, value in options.items() if value is not None},
        size=size or "",
    )
    go_on = f"go on with: vort train --out {shlex.quote(str(out))} --resume"
    try:
        with watching(out), hold(out):
            found = latest_checkpoint(out)
            if found is not None and not resume:
                raise FileExistsError(
                    f"{out} holds a run already, {found.name}: take another --out, or {go_on}"
                )
            if found is None:
                _refuse_files_of_others(out)
            _run(out, given, resume, ends)
    except Stopped as stop:
        _say(f"stopped at step {stop.step:,} of {stop.total:,}, saved; {go_on}")
        raise typer.Exit(130 if stop.interrupted else 0) from None
    except KeyboardInterrupt:
        saved = latest_checkpoint(out)
        where = "nothing was saved" if saved is None else f"{saved.name} is saved; {go_on}"
        _say(f"stopped; {where}")
        raise typer.Exit(130) from None


def _typed(kind: Any, given: list[str] | None, option: str) -> dict[str, Any]:
    from vort.names import typed

    return typed(kind, read_settings(given, option), option)


def _together(
    plain: dict[str, Any], spelled: dict[str, str], settings: dict[str, Any], option: str
) -> dict[str, Any]:
    """What options of their own and name=value pairs say, which must not be two values of one key.

    Args:
        plain: what options of their own say.
        spelled: how these were given, by key.
        settings: of the pairs.
        option: of the pairs.
    """
    for key in settings:
        if key in plain and plain[key] != settings[key]:
            raise typer.BadParameter(
                f"give {spelled[key]} or {option} {key}, not both: got {plain[key]} and "
                f"{settings[key]}"
            )
    return {**plain, **settings}


def _refuse_files_of_others(out: Path) -> None:
    """Refuse a folder without a run of ours whose contents a run would replace by its own."""
    if (out / FILE).is_file():
        RunSettings.read(out)  # of a run that saved no checkpoint; of something else it is damaged
        return
    # Tokens that were packed before a run was refused are ours.
    packed = (out / "tokens" / "index.json").is_file()
    for name in ("model", "result.json", *(() if packed else ("tokens",))):
        if (out / name).exists():
            raise FileExistsError(
                f"--out must be a folder that a run can have to itself, and {out / name} is there, "
                "of no run: take another --out"
            )


def _task_of(
    task: str | None, text: str | None, seed: int | None, settings: dict[str, Any]
) -> dict[str, Any]:
    """The task that options describe, as far as they do."""
    import vort.lab.experiments  # noqa: F401  # some define tasks of their own
    from vort.lab.tasks import TASKS
    from vort.lab.tasks.corpus import find_source
    from vort.names import typed

    if task is not None and text is not None:
        raise typer.BadParameter(f"give a TASK or --text, not both: got {task} and --text {text}")
    plain: dict[str, Any] = {} if task is None else {"name": task}
    spelled = {"name": "TASK", "seed": "--seed"}
    plain |= {} if seed is None else {"seed": seed}
    if text is not None:
        plain |= {"name": "books", "source": text, "marks": True}
        spelled |= dict.fromkeys(("name", "source", "marks"), "--text")
    found = _together(plain, spelled, settings, "--task-set")
    if "source" in found:
        found["source"] = find_source(str(found["source"]))
        if text is not None and found["source"].startswith("hf:"):
            found.setdefault("max_bytes", _MOST_BYTES)
    kind = TASKS.get(str(found.get("name")))
    return found if kind is None else typed(kind, found, "--task-set")


def _run(out: Path, given: RunSettings, resume: bool, ends: float | None) -> None:
    """Train in a folder that is ours, from its own settings or from those given.

    ends: when to save and stop, by `perf_counter`; None: at the last step.
    """
    from vort.lab.training import train as run_training
    from vort.lab.training.peers import shared

    quiet_libraries()
    if resume:
        settings = RunSettings.read(out)
        made = make_task_of(settings)
        given = _in_steps(given, settings, made)
        settings.refuse_others(given, out)
        settings = replace(settings, training={**settings.training, **given.training})
    elif "name" not in given.task:
        raise typer.BadParameter("give --text FILE, FOLDER or OWNER/NAME, or a TASK, or --resume")
    else:
        settings, made = _plan(given, out)
        first = shared(settings)
        if first != settings:  # the first process has seen another machine, or more room
            settings, made = first, make_task_of(first)
    _pack(made, out)
    may_split = made.text and not resume and "accumulation" not in given.training
    model, config, settings = _prepare(settings, made, _steps_done(out), may_split=may_split)
    if not resume and rank() == 0:
        settings.write(out)
    seconds = None if ends is None else ends - perf_counter()
    found = run_training(model, made, config, directory=out, resume=resume, seconds=seconds)
    show_metrics(found.test or found.validation, made)
    if made.text:
        _save_model(model, out)
    _say(f"result: {out / 'result.json'}")


def _steps_done(out: Path) -> int:
    from vort.lab.training import latest_checkpoint

    found = latest_checkpoint(out)
    return 0 if found is None else int(found.name.removeprefix("step-"))


def make_task_of(settings: RunSettings) -> Any:
    """The task of a run."""
    import vort.lab.experiments  # noqa: F401  # some define tasks of their own
    from vort.lab.tasks import make_task

    return make_task(**settings.task)


def _pack(task: Any, out: Path) -> None:
    """Put the tokens of a text that is too large for memory into files; one process does it."""
    from vort.lab.training.peers import shared

    if not hasattr(task, "pack"):
        return
    if rank() == 0:
        with console.status("packing the text"):
            task.pack(out / "tokens")
    shared(None)
    task.pack(out / "tokens")


def _plan(given: RunSettings, out: Path) -> tuple[RunSettings, Any]:
    """Everything that was not said, for a text by its size and the machine; and the task."""
    from vort.lab.training.forecast import free_memory
    from vort.lab.training.peers import training_device
    from vort.lab.training.sizes import (
        TEXT_SIZES,
        choose_size,
        settings_for_text,
        weight_decay_for,
    )
    from vort.memories import LayerSettings
    from vort.names import check_choice

    task = {"seed": given.training.get("seed", 0), **given.task}
    if not task.get("marks"):
        if given.size:
            raise typer.BadParameter(f"--size is of models of text: it needs --text, got {task}")
        training = {**_DEFAULTS, **given.training}
        if "epochs" in given.training and "steps" not in given.training:
            del training["steps"]
        model = {"output_gate": LayerSettings().output_gate, **given.model}
        found = replace(given, task=task, model=model, training=training)
        return found, make_task_of(found)
    books = make_task_of(replace(given, task=task))
    _pack(books, out)
    device = training_device()
    name = given.size or choose_size(books.characters("train"), device, free_memory(device))
    check_choice("--size", name, TEXT_SIZES)
    size = TEXT_SIZES[name]
    asked = {**given.training, **({"length": task["length"]} if "length" in task else {})}
    tuned = settings_for_text(books, size, asked)
    task["length"] = tuned.pop("length")
    training = {**tuned, "seed": 0, **given.training}
    read = training["batch_size"] * task["length"]
    if "epochs" in training and "steps" not in given.training:
        training["steps"] = _steps_of(training.pop("epochs"), books, read)
    passes = training["steps"] * read / books.characters("train")
    training = {"weight_decay": weight_decay_for(passes), **training}
    model = {**size.model, **given.model}
    return RunSettings(task, model, training, name), books.of_length(task["length"])


def _steps_of(epochs: float, books: Any, read: int) -> int:
    """Steps in which a text is read so often; read: characters of a batch."""
    count: int = books.characters("train")
    return max(1, round(epochs * count / read))


def _in_steps(given: RunSettings, own: RunSettings, task: Any) -> RunSettings:
    """What is given to a run of a text that is there, which counts its epochs in steps."""
    training = given.training
    counted = "steps" in own.training and "steps" not in training
    if not task.text or "epochs" not in training or not counted:
        return given
    rest = {name: value for name, value in training.items() if name != "epochs"}
    read = own.training["batch_size"] * task.length
    steps = _steps_of(training["epochs"], task, read)
    return replace(given, training={"steps": steps, **rest})


def _prepare(
    settings: RunSettings, task: Any, done: int, *, may_split: bool
) -> tuple[Any, Any, RunSettings]:
    """Model and training as they will be, once it is said what they take, and that it is there.

    Args:
        settings: of the run.
        task: made from them.
        done: steps that are behind it.
        may_split: whether a batch may be split into as many pieces as fit.
    """
    from vort.lab.experiments.models import build_model
    from vort.lab.training import TrainingConfig
    from vort.lab.training.forecast import forecast
    from vort.lab.training.peers import shared
    from vort.lab.training.setup import check_tracker
    from vort.models import VortConfig
    from vort.names import typed

    if "steps" in settings.training and "epochs" in settings.training:
        raise typer.BadParameter("give --steps or --epochs, not both")
    config = TrainingConfig.from_dict(settings.training)
    check_tracker(config)
    own = typed(VortConfig, with_text_tokens(task, settings.model))
    _check_vocabulary(task, own)
    _check_parameters(task, own)
    model = build_model(task, own, config.seed)
    with console.status("measuring a step"):
        found = forecast(model, task, config)
    pieces = shared(found.accumulation(config.batch_size, config.accumulation))
    if pieces is None:
        raise ValueError(
            f"training would take about {_bytes(found.memory(1))} of memory a sequence, and "
            f"{_bytes(found.free)} are free: take a smaller --size, or --task-set length"
        )
    if pieces > max(_MOST_PIECES, config.accumulation):
        raise ValueError(
            f"batch_size must be of at most {_MOST_PIECES:,} pieces that fit one by one, got "
            f"{config.batch_size:,}, which takes {pieces:,}"
        )
    each = config.batch_size // found.processes
    if pieces > config.accumulation:
        if not may_split:
            raise ValueError(
                "training would take about "
                f"{_bytes(found.memory(each // config.accumulation))} of memory, and "
                f"{_bytes(found.free)} are free: --accumulation {pieces} would do with "
                f"{_bytes(found.memory(each // pieces))}"
            )
        config = replace(config, accumulation=pieces)
        settings = replace(settings, training={**settings.training, "accumulation": pieces})
    _announce(settings, task, config, model, found, done)
    return model, config, settings


def with_text_tokens(task: Any, model: dict[str, Any]) -> dict[str, Any]:
    """Bytes of text are `ByteTokenizer`'s, with its special tokens: the defaults of VortConfig."""
    from vort.models import VortConfig

    tokens = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
    default = VortConfig()
    return {**({name: getattr(default, name) for name in tokens} if task.text else {}), **model}


def _check_vocabulary(task: Any, settings: dict[str, Any]) -> None:
    """Refuse a model that lacks tokens which the task, or the tokenizer of a text, has."""
    from vort.models import VortConfig

    least = VortConfig().vocab_size if task.text else task.vocab_size
    whose = "ByteTokenizer's" if task.text else f"those of {task.name}"
    size = settings.get("vocab_size", least)
    if size < least:
        raise ValueError(f"--model-set vocab_size must be at least {least}, {whose}, got {size}")
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = settings.get(name)
        if any(not 0 <= token < size for token in _tokens(value)):
            raise ValueError(f"--model-set {name} must lie in [0, {size - 1}], got {value}")


def _tokens(value: int | list[int] | None) -> list[int]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _check_parameters(task: Any, settings: dict[str, Any]) -> None:
    """Refuse a model whose weights alone would not fit, before it is made."""
    from vort.lab.experiments.models import model_config
    from vort.lab.training.forecast import BYTES_PER_PARAMETER, free_memory
    from vort.lab.training.peers import training_device

    config = model_config(task, settings)
    # The least that a block can have; the rest is counted when it is there.
    least = config.num_hidden_layers * 4 * config.hidden_size**2
    needed, free = BYTES_PER_PARAMETER * least, free_memory(training_device())
    if needed > free:
        raise ValueError(
            f"training would take more than {_bytes(needed)} for the weights alone, and "
            f"{_bytes(free)} are free: take a smaller --size or model"
        )


def _announce(
    settings: RunSettings, task: Any, config: Any, model: Any, found: Any, done: int
) -> None:
    """Say what will be done, on what, and what it will take."""
    from vort.lab.training.forecast import device_in_words
    from vort.lab.training.peers import training_device
    from vort.lab.training.progress import in_words

    if task.text:
        _show_splits(task)
    left = max(found.steps - done, 0)
    shape = model.config
    name = f"{settings.size}, " if settings.size else ""
    piece = config.batch_size // (config.accumulation * found.processes)
    parts = f" in {config.accumulation} pieces" if config.accumulation > 1 else ""
    read = found.steps * config.batch_size * task.length
    often = [f"{read / task.characters('train'):,.1f} passes over the text"] if task.text else []
    wanted = in_words(found.time(left))
    wanted = wanted if wanted.startswith("under") else f"about {wanted}"
    lines = {
        "device": device_in_words(training_device())
        + (f", {found.processes} processes" if found.processes > 1 else ""),
        "model": f"{name}{found.parameters:,} parameters: {shape.num_hidden_layers} layers of "
        f"{shape.hidden_size}, memory {shape.memory_in_words()}",
        "training": ", ".join(
            [
                f"{found.steps:,} steps of {config.batch_size} x {task.length:,} "
                f"{'bytes' if task.text else 'tokens'}{parts}",
                *often,
                f"weight decay {config.weight_decay:g}",
            ]
        ),
        "memory": f"about {_bytes(found.memory(piece))} of {_bytes(found.free)} that are free",
        "time": f"{wanted}, {found.seconds:.2g} s a step"
        + (f", for the {left:,} steps to come" if done else ""),
    }
    for key, value in lines.items():
        _say(f"{key + ':':9} {value}")
    say_horizon(model, task.length, "; --model-set horizon=... makes it for longer ones")


def _show_splits(task: Any) -> None:
    from vort.lab.report.tables import Sheet
    from vort.lab.tasks import SPLITS

    total = sum(task.characters(split) for split in SPLITS)
    documents, how, left_out = task.splits()
    rows = [
        [split, f"{documents[split]:,}", f"{size:,}", f"{size / total:.0%}"]
        for split in SPLITS
        for size in [task.characters(split)]
    ]
    headings = ("split", "documents", "bytes", "share")
    console.print(Sheet(f"text, split {how}", headings, rows).to_rich())
    if left_out:
        _say(f"left out: {left_out}")


def _say(text: str) -> None:
    say(console, text)


def _bytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.0f} MB"


def _save_model(model: Any, out: Path) -> None:
    """As Hugging Face saves models, whole or not at all, and what can be done with it."""
    from vort.lab.training.checkpoint import complete_folder, is_sharded, whole_weights
    from vort.models import ByteTokenizer

    whole = {"state_dict": whole_weights(model)} if is_sharded(model) else {}
    if rank() == 0:
        with complete_folder(out / "model") as folder:
            model.save_pretrained(folder, **whole)
            ByteTokenizer().save_pretrained(folder)
    place = out / "model"
    for line in (
        f"model: {place}; take it with",
        f'  vort generate {out} --prompt "..."',
        f"  vort lens {out} --text FILE",
        f'  vort.VortForCausalLM.from_pretrained("{place}")',
        f"  lm_eval --model hf --model_args pretrained={place},trust_remote_code=True --tasks ...",
    ):
        _say(line)


def show_metrics(metrics: Any, task: Any) -> None:
    """A table of scores by bucket."""
    from vort.lab.report.tables import Sheet

    rows = [
        [name, f"{100 * found['accuracy']:.1f}", f"{found['bits']:.3f}", f"{found['count']:,.0f}"]
        for name, found in metrics.items()
    ]
    headings = ("lag or position", "accuracy (%)", "bits", "asked")
    console.print(Sheet(task.name, headings, rows).to_rich())
