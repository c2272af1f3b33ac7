"""Make a run of `vort train --text` a model that comes with the package.

    python tools/publish_model.py RUN --name books-6m

Its matrices are rounded to bfloat16, all is written to src/vort/pretrained/NAME, read again and
scored: bits a byte by position, on the validation texts and, this once, on the test texts. The card
(from model_card.md) and scores.json beside the weights say how it was trained and what came out.
What is there already is left as it is.
"""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import GenerationConfig

from vort.files import write_atomically
from vort.lab.commands import find_model, quiet_libraries, read_device
from vort.lab.commands.generate import fitting_threads
from vort.lab.commands.settings import OPTIONS, RunSettings
from vort.lab.commands.train import make_task_of
from vort.lab.experiments.reading import BOUNDS
from vort.lab.processes import keep_memory
from vort.lab.report.provenance import provenance
from vort.lab.tasks import Books, Split
from vort.lab.training import Metrics, evaluate
from vort.lab.training.checkpoint import complete_folder
from vort.lab.training.progress import in_words
from vort.lab.training.sizes import TEXT_SIZES
from vort.models import ByteTokenizer, VortForCausalLM, VortSession
from vort.pretrained import DEFAULT, FOLDER

CARD = Path(__file__).with_name("model_card.md")
MOST_BYTES = 13_000_000
# The draws that text comes out of best; what `vort generate` takes where nothing is said.
DRAWS = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
PROMPT, SAMPLE_TOKENS = "It was a dark", 400
TEXTS = (
    "English prose first published between 1721 and 1918, in the public domain, as the collection "
    "mlschmitt/classic-books-markdown has it; 7-bit ASCII, paragraphs apart by an empty line. No "
    "author of a test book is among the authors of the others."
)
LICENCE = "The texts are in the public domain."
# Settings of a task that options of their own say.
_SAID = ("name", "source", "marks", "seed")
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
app = typer.Typer(add_completion=False)


@app.command()
def publish(
    run: Annotated[Path, typer.Argument(help="A finished run of vort train --text.")],
    name: Annotated[str, typer.Option(help="What the model is found by.")] = DEFAULT,
    into: Annotated[Path, typer.Option(help="Where its folder goes.")] = FOLDER,
    text: Annotated[
        Path | None, typer.Option(help="Where the texts are now; as the run has it if absent.")
    ] = None,
    about: Annotated[str, typer.Option(help="What texts these are, for the card.")] = TEXTS,
    licence: Annotated[str, typer.Option(help="That of the texts, for the card.")] = LICENCE,
    commit: Annotated[
        str | None, typer.Option(help="That it was trained at; this one's if absent.")
    ] = None,
    trained_on: Annotated[
        str | None, typer.Option(help="The device; this machine's if absent.")
    ] = None,
    length: Annotated[int, typer.Option(help="Of the windows that are scored.")] = 32768,
    sequences: Annotated[
        int | None, typer.Option(help="Windows of a split to score; all if absent.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Windows at a time.")] = 4,
    device: Annotated[str | None, typer.Option(help="cpu, cuda; a GPU if absent.")] = None,
) -> None:
    """Round, write, read again, score, and describe."""
    target = into / name
    if target.exists():
        raise typer.BadParameter(f"{target} is there already: test texts are scored once")
    quiet_libraries()
    where = read_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    settings = RunSettings.read(run)
    if text is not None:
        settings = replace(settings, task={**settings.task, "source": str(text.resolve())})
    task = make_task_of(settings)
    if not isinstance(task, Books) or not task.marks:
        raise typer.BadParameter(f"{run} is no run of vort train --text")
    scored = replace(
        task.of_length(length), bounds=tuple(bound for bound in BOUNDS if bound < length)
    )
    vars(scored)["corpus"] = task.corpus
    result = json.loads((run / "result.json").read_text())
    made_by = {**provenance(), "trained_at": commit, "trained_on": trained_on}
    for given, own in (("trained_at", "commit"), ("trained_on", "device")):
        made_by[given] = made_by[given] or made_by[own]
    with complete_folder(target) as folder:
        write_weights(VortForCausalLM.from_pretrained(find_model(str(run))), folder)
        scores = score(folder, scored, where, sequences, batch_size)
        model = VortForCausalLM.from_pretrained(folder).eval()
        record = {
            "parameters": sum(x.numel() for x in model.parameters()),
            "scores": scores,
            "windows": {"length": length, "sequences": sequences},
            "task": scored.describe(),
            "training": {key: result[key] for key in ("steps", "seconds", "tokens_per_second")},
            "made_by": made_by,
        }
        write_atomically(folder / "scores.json", json.dumps(record, indent=1) + "\n")
        sheet = card(name, record, settings, task, model, (about, licence))
        write_atomically(folder / "README.md", sheet)
        size = sum(path.stat().st_size for path in folder.iterdir())
        if size > MOST_BYTES:
            raise typer.BadParameter(f"the folder has {size:,} bytes, at most {MOST_BYTES:,} do")
    typer.echo(f"{target}: {size:,} bytes, test {scores['test']['all']['bits']:.4f} bits a byte")


def write_weights(model: VortForCausalLM, folder: Path) -> None:
    """Matrices in bfloat16, all else (norms, orders, gates' biases) as it is; config, tokenizer.

    The config says float32, which is what is computed in unless somebody asks for another.
    """
    drawn = {**DRAWS, **{key: getattr(model.config, key) for key in _TOKENS}}
    model.generation_config = GenerationConfig(**drawn)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder, state_dict=rounded(model.state_dict()))
    ByteTokenizer().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes for its owner alone


def rounded(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights with their matrices in bfloat16."""
    return {name: x.bfloat16() if x.ndim > 1 else x for name, x in weights.items()}


def score(
    folder: Path, task: Books, device: str, sequences: int | None, batch_size: int
) -> dict[str, Any]:
    """Bits a byte by position: both splits computed in float32, validation in bfloat16 too."""
    found: dict[str, Any] = {}
    model = VortForCausalLM.from_pretrained(folder).to(device).eval()

    def scores(split: Split) -> Metrics:
        return evaluate(model, task, split, sequences=sequences, batch_size=batch_size)

    found["validation"], found["test"] = scores("validation"), scores("test")
    model.to(torch.bfloat16)
    found["validation in bfloat16"] = scores("validation")
    return found


def sample(model: VortForCausalLM) -> str:
    """What it writes on the prompt of the card, as `vort generate --seed 0` does on a CPU."""
    session = VortSession(model, ByteTokenizer(), seed=0)
    session.feed(PROMPT)
    draws = {name: x for name, x in DRAWS.items() if name != "do_sample"}
    with fitting_threads(model):
        return PROMPT + "".join(session.stream(SAMPLE_TOKENS, **draws))


def command_of(settings: RunSettings) -> str:
    """The `vort train` that a run was begun with, paths apart."""
    known = dict(TEXT_SIZES[settings.size].model) if settings.size else {}
    parts = ["--text", Path(settings.task["source"]).name]
    parts += ["--size", settings.size] if settings.size else []
    sets = {
        "--task-set": {k: x for k, x in settings.task.items() if k not in _SAID},
        "--model-set": {k: x for k, x in settings.model.items() if known.get(k) != x},
        "--training-set": {k: x for k, x in settings.training.items() if k not in OPTIONS},
    }
    for key in OPTIONS:
        if key in settings.training:
            parts += [f"--{key.replace('_', '-')}", str(settings.training[key])]
    for option, given in sets.items():
        parts += [part for key, x in given.items() for part in (option, f"{key}={json.dumps(x)}")]
    return f"vort train --out run {shlex.join(parts)}"


def card(
    name: str,
    record: dict[str, Any],
    settings: RunSettings,
    task: Books,
    model: VortForCausalLM,
    texts: tuple[str, str],
) -> str:
    """The README.md of a model's folder.

    texts: what its texts are, and under which licence.
    """
    config, made_by, training = model.config, record["made_by"], record["training"]
    documents, limited = task.splits()[0], record["windows"]["sequences"]
    read = training["steps"] * settings.training["batch_size"] * task.length
    session = VortSession(model, ByteTokenizer())
    assert config.bos_token_id is not None  # ByteTokenizer's
    session.feed([config.bos_token_id])
    rows = [(split, documents[split], task.characters(split)) for split in documents]
    return CARD.read_text().format(
        name=name,
        parameters=record["parameters"],
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        window=config.sliding_window,
        scales=config.num_scales,
        horizon=config.horizon,
        memory=session.nbytes / 1e6,
        prompt=PROMPT,
        command=command_of(settings),
        steps=training["steps"],
        read=read / 1e6,
        passes=read / task.characters("train"),
        time=in_words(training["seconds"]),
        seed=settings.training.get("seed", 0),
        about=texts[0],
        splits="\n".join(f"| {split} | {count} | {size:,} |" for split, count, size in rows),
        digest=task.digest,
        windows=f"the first {limited} windows" if limited else "windows side by side",
        length=record["windows"]["length"],
        trained_length=task.length,
        scores=table(record["scores"]),
        sample="\n".join(f"    {line}".rstrip() for line in sample(model).splitlines()),
        sample_tokens=SAMPLE_TOKENS,
        licence=texts[1],
        **{key: DRAWS[key] for key in ("temperature", "top_p")},
        **{key: made_by[key] for key in ("trained_on", "trained_at", "device", "commit", "torch")},
    )


def table(scores: dict[str, Any]) -> str:
    """Rows of a score each, columns by position."""
    columns = [*(key for key in scores["test"] if key != "all"), "all"]
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for row, found in scores.items():
        cells = " | ".join(f"{found[key]['bits']:.4f}" for key in columns)
        lines.append(f"| {row} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    keep_memory()
    app()
