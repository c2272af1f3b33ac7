"""`vort eval`: a trained run on its task again, or any causal model on a suite of long prompts."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import typer

from vort.lab.commands import (
    books_of,
    check_seed,
    find_model,
    is_terminal,
    quiet_libraries,
    read_device,
    read_settings,
    say_horizon,
)
from vort.lab.commands.settings import RunSettings
from vort.lab.commands.train import console, make_task_of, show_metrics, with_text_tokens

SUITES = ("ruler", "multi_needle")
# Options of one of the two, and what there is instead for the other.
_OF_RUNS = {
    "split": "",
    "sequences": "--samples",
    "batch_size": "",
    "task_set": "--lengths, --tasks or --needles",
    "horizon": "",
    "exact": "",
}
_OF_SUITES = {
    "lengths": "--task-set length=",
    "tasks": "",
    "samples": "--sequences",
    "seed": "--task-set seed=",
    "data": "--task-set source=",
    "needles": "",
    "piece": "",
    "chat": "",
    "out": "",
    "prompts": "",
    "device": "",
}
# Options that write no prompts.
_OF_MODELS = {"piece": "", "chat": "lm_eval's --apply_chat_template", "device": ""}
# Characters of books that are read, whatever lengths are asked for: samples do not depend on them.
_BOOKS = 5 << 20
# Any of these is a tokenizer's.
_TOKENIZERS = ("tokenizer*", "*.model", "vocab.*", "*vocab*.txt")
# Bytes of a file that is read whole to know it again.
_SMALL = 64 << 20
# Seconds between lines where no bar can be drawn.
_EVERY = 10.0


def evaluate(
    ctx: typer.Context,
    run: Annotated[
        Path | None, typer.Argument(help="Folder that `vort train` wrote to; not with --suite.")
    ] = None,
    split: Annotated[
        str, typer.Option(help="test, validation, or train with --sequences.")
    ] = "test",
    sequences: Annotated[int | None, typer.Option(help="How many; all by default.")] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences at a time.")] = 16,
    task_set: Annotated[
        list[str] | None, typer.Option(help="Another setting of the task, e.g. length=4000.")
    ] = None,
    horizon: Annotated[
        int | None, typer.Option(help="Re-calibrate VORT for lags up to this first.")
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Count answers that are right as a whole.")
    ] = False,
    suite: Annotated[
        str | None, typer.Option(help="ruler or multi_needle: prompts for any causal model.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="With --suite: a folder of a model, or OWNER/NAME.")
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="With --suite: tokens of a sample, e.g. 4096,131072.")
    ] = "4096",
    tasks: Annotated[
        str | None, typer.Option(help="With --suite: some of its tasks, by commas.")
    ] = None,
    samples: Annotated[int, typer.Option(help="With --suite: of each task and length.")] = 500,
    seed: Annotated[int, typer.Option(help="With --suite: of its samples.")] = 42,
    data: Annotated[
        Path | None,
        typer.Option(help="With --suite: a folder of .txt books, files of SQuAD and HotpotQA."),
    ] = None,
    needles: Annotated[int, typer.Option(help="With multi_needle: facts in a text.")] = 4,
    piece: Annotated[int, typer.Option(help="With --suite: tokens read at a time.")] = 8192,
    out: Annotated[
        Path | None, typer.Option(help="With --suite: folder for results; SUITE-MODEL by default.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="With --suite: put the model's chat template around.")
    ] = False,
    prompts: Annotated[
        bool, typer.Option("--prompts", help="With --suite: only write them, as lm_eval has them.")
    ] = False,
    device: Annotated[str, typer.Option(help="With --suite: cpu, cuda, ...")] = "cpu",
) -> None:
    """Score a trained model, also on longer sequences; or any causal model on a suite.

    With --suite, samples that OUT already has are not done again: an interrupted command goes on
    where it was, one with more --samples, --lengths or --tasks adds to them.
    """
    if suite is None:
        if model is not None or run is None:
            raise typer.BadParameter("give the folder of a run, or --suite with --model")
        _refuse_given(ctx, _OF_SUITES, "--suite", "a run")
        if batch_size < 1:
            raise typer.BadParameter(f"--batch-size must be at least 1, got {batch_size}")
        _evaluate_run(run, split, sequences, batch_size, task_set, horizon, exact)
        return
    if suite not in SUITES:
        raise typer.BadParameter(f"--suite takes {' or '.join(SUITES)}, got {suite}")
    if run is not None or model is None:
        raise typer.BadParameter("--suite needs --model DIR, and no run")
    _refuse_given(ctx, _OF_RUNS, "a run", "--suite")
    if prompts:
        _refuse_given(ctx, _OF_MODELS, "answers", "--prompts")
    if suite != "multi_needle":
        _refuse_given(ctx, {"needles": ""}, "--suite multi_needle", f"--suite {suite}")
    check_seed(seed)
    name = Path(model).name or "model"
    place = Path(f"{suite}-{name}") if out is None else out
    if place.exists() and not place.is_dir():
        raise typer.BadParameter(f"--out must be a folder, got {place}")
    if piece < 1:
        raise typer.BadParameter(f"--piece must be at least 1, got {piece}")
    _evaluate_suite(
        suite,
        model,
        device,
        place,
        {
            "lengths": _read_lengths(lengths),
            "tasks": tasks,
            "samples": samples,
            "seed": seed,
            "data": data,
            "needles": needles,
            "piece": piece,
            "chat": chat,
            "prompts": prompts,
        },
    )


def _refuse_given(ctx: typer.Context, others: Mapping[str, str], owner: str, here: str) -> None:
    """Refuse an option that has no effect here.

    Args:
        ctx: knows what was given.
        others: options, and what there is instead.
        owner: what they are for.
        here: what is asked for.
    """
    for name, instead in others.items():
        source = ctx.get_parameter_source(name)
        if source is not None and not source.name.startswith("DEFAULT"):
            hint = f"; for {here} use {instead}" if instead else f", and has no effect on {here}"
            raise typer.BadParameter(f"--{name.replace('_', '-')} is for {owner}{hint}")


def _evaluate_run(
    run: Path,
    split: str,
    sequences: int | None,
    batch_size: int,
    task_set: list[str] | None,
    horizon: int | None,
    exact: bool,
) -> None:
    from vort.lab.evaluation import exact_matches
    from vort.lab.experiments.models import build_model
    from vort.lab.tasks.corpus import find_source
    from vort.lab.training import evaluate as score
    from vort.lab.training import latest_checkpoint, load_weights

    settings = own = RunSettings.read(run)
    changes = read_settings(task_set, "--task-set")
    if "source" in changes:
        changes["source"] = find_source(str(changes["source"]))
    settings = replace(settings, task={**settings.task, **changes})
    checkpoint = latest_checkpoint(run)
    if checkpoint is None:
        raise FileNotFoundError(f"no checkpoint in {run}: the run has not saved one yet")
    _say_unfinished(own, checkpoint)
    task = make_task_of(settings)
    model = build_model(
        task, with_text_tokens(task, settings.model), settings.training.get("seed", 0)
    )
    load_weights(checkpoint, model)
    if horizon is not None:
        model.model.set_horizon(horizon)
    say_horizon(model, task.length, f"; --horizon {task.length} re-calibrates it")
    if not exact:
        found = score(model, task, split, sequences=sequences, batch_size=batch_size)  # type: ignore[arg-type]
        show_metrics(found, task)
        return
    answers = exact_matches(model, task, split, sequences=sequences, batch_size=batch_size)  # type: ignore[arg-type]
    rows = [
        [name, f"{100 * each['exact']:.1f}", f"{each['count']:,.0f}"]
        for name, each in answers.items()
    ]
    _print(
        f"{task.name}: answers right as a whole", ("lag, depth or task", "right (%)", "of"), rows
    )


def _say_unfinished(settings: RunSettings, checkpoint: Path) -> None:
    """Say of a run that goes on how far it was at a checkpoint."""
    from vort.lab.training import TrainingConfig
    from vort.lab.training.setup import total_steps

    step = int(checkpoint.name.removeprefix("step-"))
    total = settings.training.get("steps")
    if total is None:  # epochs, which only the task can tell in steps
        config = TrainingConfig.from_dict(settings.training)
        total = total_steps(make_task_of(settings), config, 1)
    if step < total:
        typer.echo(f"step {step:,} of {total:,}: the run is not over", err=True)


def _print(title: str, headings: tuple[str, ...], rows: list[list[str]]) -> None:
    from vort.lab.report.tables import Sheet

    console.print(Sheet(title, headings, rows).to_rich())


def _read_lengths(given: str) -> list[int]:
    try:
        numbers = [float(part) for part in given.split(",")]
        found = [int(number) for number in numbers if number.is_integer() and 1 <= number < 2**31]
    except ValueError:
        numbers, found = [], []
    if not found or len(found) < len(numbers):
        raise typer.BadParameter(f"--lengths takes whole numbers by commas, got {given!r}")
    return found


def _evaluate_suite(
    name: str, model: str, device: str, out: Path, options: Mapping[str, Any]
) -> None:
    from vort.lab.commands import read_names
    from vort.lab.evaluation import run_suite, write_prompts

    place, device = find_model(model), read_device(device)
    quiet_libraries()
    tokenizer = _load_tokenizer(place)
    suite = _suite(name, tokenizer, options)
    tasks = read_names(options["tasks"], "--tasks", suite.tasks)
    asked = {"lengths": options["lengths"], "tasks": tasks, "samples": options["samples"]}
    if options["prompts"]:
        typer.echo(f"prompts: {write_prompts(suite, out, **asked)}")
        return
    loaded, about = _load_model(model, place, device)
    limit = getattr(loaded.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and max(options["lengths"]) > limit:
        typer.echo(f"{model} is made for {limit:,} tokens at most, by its config", err=True)
    if getattr(loaded.config, "memory", None) is not None:
        say_horizon(loaded, max(options["lengths"]))
    watch = _Watch()
    found = run_suite(
        loaded,
        suite,
        out,
        **asked,
        stop=_ends(loaded, tokenizer),
        piece=options["piece"],
        about=about,
        watch=watch,
    )
    watch.end()
    _show_suite(name, found)
    typer.echo(f"results: {out / 'summary.json'}")


def _load_tokenizer(place: str) -> Any:
    """A model's tokenizer; bytes where a folder has none and its vocabulary is one of bytes."""
    from transformers import AutoConfig, AutoTokenizer

    from vort.models import ByteTokenizer

    folder = Path(place)
    if not folder.is_dir() or any(any(folder.glob(name)) for name in _TOKENIZERS):
        try:
            return AutoTokenizer.from_pretrained(place)
        except Exception as problem:  # of as many kinds as there are tokenizers
            raise ValueError(f"no tokenizer can be read from {place}: {problem}") from problem
    size = AutoConfig.from_pretrained(place).get_text_config().vocab_size
    tokenizer = ByteTokenizer()
    if not tokenizer.vocab_size <= size <= len(tokenizer):
        raise ValueError(
            f"{place} has no tokenizer, and a vocabulary of {size:,} is not one of bytes"
        )
    typer.echo(f"{place} has no tokenizer: text is read as bytes", err=True)
    return tokenizer


def _load_model(name: str, place: str, device: str) -> tuple[Any, dict[str, Any]]:
    """Any causal model in evaluation mode, and which it is."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(place)
    except SafetensorError as problem:
        raise ValueError(f"the weights in {place} are damaged: {problem}") from problem
    loaded.eval()
    loaded.to(torch.device(device))
    folder = Path(place)
    if not folder.is_dir():
        return loaded, {"model": name}
    return loaded, {"model": Path(name).name or name, "fingerprint": _fingerprint(folder)}


def _fingerprint(folder: Path) -> str:
    """Changes when a model or its tokenizer does; of large files, by 4 KiB of each MiB."""
    found = sha256()
    kinds = ("config.json", *_TOKENIZERS, "merges.txt", "*.safetensors", "*.bin")
    for path in sorted({path for kind in kinds for path in folder.glob(kind) if path.is_file()}):
        size = path.stat().st_size
        found.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for place in range(0, size, 1 << 20):
                file.seek(place)
                found.update(file.read(1 << 20 if size < _SMALL else 1 << 12))
    return found.hexdigest()[:12]


def _ends(model: Any, tokenizer: Any) -> list[int]:
    """Tokens that end a text."""
    config, own = model.config, getattr(model, "generation_config", None)
    settings = (tokenizer, config, config.get_text_config(), own)
    found = [getattr(each, "eos_token_id", None) for each in settings]
    flat = [x for each in found for x in (each if isinstance(each, list) else [each])]
    return sorted({x for x in flat if x is not None})


def _suite(name: str, tokenizer: Any, options: Mapping[str, Any]) -> Any:
    """A suite in a model's tokens, with what the folder of data has for it."""
    from vort.lab.evaluation import NeedleSuite, RulerSuite
    from vort.lab.tasks.corpus import load_corpus
    from vort.lab.tasks.haystack import Kit, book_sentences
    from vort.lab.tasks.pieces import ByteCoder, HuggingFaceCoder
    from vort.lab.tasks.ruler import ESSAYS
    from vort.models import ByteTokenizer

    plain = isinstance(tokenizer, ByteTokenizer)
    if plain and options["chat"]:
        raise typer.BadParameter("--chat needs a tokenizer with a chat template: this one is bytes")
    coder = ByteCoder() if plain else HuggingFaceCoder(tokenizer, options["chat"])
    kit = Kit(coder, real_words=True)
    data, books = options["data"], books_of(options["data"])
    haystack = None
    if books is not None and any(books.rglob("*.txt")):
        haystack = book_sentences(load_corpus(str(books))["test"], coder, _BOOKS)
    why = "no --data" if books is None else f"no .txt below {books}"
    what = f"texts of {books}" if haystack is not None else f"made sentences, {why}"
    asked = options["tasks"] or ",".join(ESSAYS)
    if name == "multi_needle" or any(task.strip() in ESSAYS for task in asked.split(",")):
        typer.echo(f"{'haystack' if name == 'multi_needle' else 'essays'}: {what}", err=True)
    if name == "multi_needle":
        return NeedleSuite(kit, haystack, options["needles"], seed=options["seed"])
    wanted = None if options["tasks"] is None else options["tasks"].split(",")
    return RulerSuite(kit, haystack, _questions(data, wanted), seed=options["seed"])


def _questions(data: Path | None, wanted: list[str] | None) -> dict[str, Any]:
    """Questions of the tasks that ask some: all that are wanted, or that a folder has."""
    from vort.lab.tasks.question_files import find_file, read_hotpotqa, read_squad

    files = {
        "qa_1": (read_squad, ("*squad*.json", "dev-v*.json", "train-v*.json")),
        "qa_2": (read_hotpotqa, ("*hotpot*.json",)),
    }
    found = {}
    for task, (read, patterns) in files.items():
        named = wanted is not None and task in [each.strip() for each in wanted]
        if wanted is not None and not named:
            continue
        if data is None:
            if named:
                raise typer.BadParameter(f"{task} needs --data with a file {patterns[0]}")
            typer.echo(f"{task} is left out: no --data with a file {patterns[0]}", err=True)
            continue
        try:
            path = find_file(data, *patterns)
        except FileNotFoundError as problem:
            if named:
                raise
            typer.echo(f"{task} is left out: {problem}", err=True)
            continue
        found[task] = read(path)
    return found


class _Watch:
    """How far a suite is: a line each few seconds and at the end."""

    def __init__(self) -> None:
        self.begun = self.said = monotonic()
        self.done = 0

    def __call__(self, number: int, total: int, record: Mapping[str, Any]) -> None:
        from vort.lab.training.progress import in_words

        self.done += 1
        now = monotonic()
        every = 1.0 if is_terminal(sys.stderr) else _EVERY
        if now - self.said < every and number < total:
            return
        self.said = now
        left = in_words((now - self.begun) / self.done * (total - number))
        line = f"{number:,}/{total:,}  {record['task']} at {record['length']:,}  {left} left"
        if is_terminal(sys.stderr):
            typer.echo(f"\r{line:<78}", err=True, nl=False)
        else:
            typer.echo(line, err=True)

    def end(self) -> None:
        """Leave the line that was written again and again."""
        if self.done and is_terminal(sys.stderr):
            typer.echo(err=True)


def _show_suite(name: str, found: Mapping[str, Any]) -> None:
    lengths = list(found["average"])
    rows = [
        [task, *(f"{100 * each[x]['score']:.1f}" if x in each else "" for x in lengths)]
        for task, each in found["scores"].items()
    ]
    rows.append(["average", *(f"{100 * found['average'][x]:.1f}" for x in lengths)])
    _print(f"{name}, score (%) by length", ("task", *(f"{int(x):,}" for x in lengths)), rows)
    if name != "multi_needle":
        return
    for task, each in found["depths"].items():
        depths = sorted({depth for by_depth in each.values() for depth in by_depth}, key=float)
        rows = [
            [
                f"{100 * float(depth):g}%",
                *(
                    f"{100 * each[x][depth]:.0f}" if depth in each.get(x, {}) else ""
                    for x in lengths
                ),
            ]
            for depth in depths
        ]
        title = f"{task}: found (%) by depth and length"
        _print(title, ("depth", *(f"{int(x):,}" for x in lengths)), rows)
