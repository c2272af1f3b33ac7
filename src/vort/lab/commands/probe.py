"""`vort probe`: train and judge the entity probes."""

import sys
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

if TYPE_CHECKING:
    from vort.layers.entity_probe import EntityProbe
    from vort.layers.entity_probe.litbank import Novel, Split
    from vort.layers.entity_probe.scoring import Score
    from vort.layers.entity_probe.training import Fit

app = typer.Typer(help="Entity probes: train, evaluate, try.", no_args_is_help=True)
console = Console()

Data = Annotated[Path, typer.Option(help="Folder that holds LitBank (coref/*.ann, *.txt).")]


@app.command()
def train(
    data: Data,
    out: Annotated[
        Path | None, typer.Option(help="File to write; unless given, the one vort ships.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws the novels of each split.")] = 0,
) -> None:
    """Fit the linear probe on LitBank's proper names and test it on novels it has not seen."""
    from vort.layers.entity_probe.linear_probe import save_probes
    from vort.layers.entity_probe.training import PENALTIES, fit_probe

    novels = _read_split(data, seed)
    fits = {}
    with Progress(console=console, transient=True) as progress:
        for name in ("full", "causal"):
            task = progress.add_task(f"fitting ({name})", total=len(PENALTIES) + 1)
            fits[name] = fit_probe(
                novels["train"],
                novels["validation"],
                causal=name == "causal",
                on_step=lambda task=task: progress.advance(task),  # type: ignore[misc]
            )
    target = out if out is not None else _shipped_file()
    about = _about(novels, fits, seed)
    save_probes(target, fits["full"].probe, fits["causal"].probe, about)
    for name, fit in fits.items():
        console.print(
            f"{name}: penalty {fit.penalty:g}, threshold {fit.probe.threshold:g}, "
            f"F1 {fit.validation_f1:.3f} on validation novels",
            highlight=False,
        )
    console.print(f"probe written to {target} ({target.stat().st_size / 1024:.0f} KiB)")
    console.print(_score_table(novels["test"], target, "test"))


@app.command("eval")
def evaluate(
    data: Data,
    probe: Annotated[
        Path | None, typer.Option(help="A probe written by train; unless given, the shipped one.")
    ] = None,
    split: Annotated[str, typer.Option(help="test, validation or train.")] = "test",
    seed: Annotated[int, typer.Option(help="Draws the novels of each split.")] = 0,
) -> None:
    """Precision, recall and F1 of every probe on the held-out novels."""
    novels = _read_split(data, seed)
    if split not in novels:
        raise typer.BadParameter(f"--split takes {', '.join(novels)}, got {split}")
    with console.status("probing"):
        table = _score_table(novels[split], probe, split)
    console.print(table)


@app.command()
def show(
    text: Annotated[str, typer.Argument(help="A text, or - for standard input.")],
    rules: Annotated[bool, typer.Option(help="Use the rules instead of the weights.")] = False,
    causal: Annotated[bool, typer.Option(help="Look at no word that comes later.")] = False,
) -> None:
    """Print the names found in a text, one a line, with their character spans."""
    from vort.layers.entity_probe import LinearProbe, RuleProbe

    content = sys.stdin.read() if text == "-" else text
    probe = RuleProbe(causal=causal) if rules else LinearProbe.pretrained(causal=causal)
    for start, end in probe.probe(content):
        typer.echo(f"{start}\t{end}\t{content[start:end]}")


def _read_split(data: Path, seed: int) -> "dict[Split, list[Novel]]":
    from vort.layers.entity_probe.litbank import read_litbank, split_novels

    try:
        return split_novels(read_litbank(data), seed)
    except (FileNotFoundError, ValueError) as problem:
        raise typer.BadParameter(str(problem), param_hint="--data") from problem


def _shipped_file() -> Path:
    return Path(str(resources.files("vort.layers.entity_probe"))) / "linear_probe.safetensors"


def _about(novels: "dict[Split, list[Novel]]", fits: "dict[str, Fit]", seed: int) -> dict[str, Any]:
    from vort.layers.entity_probe.scoring import score_probe

    return {
        "command": f"vort probe train --data LITBANK --seed {seed}",
        "data": "LitBank (dbamman/litbank, CC-BY 4.0), coref/*.ann, mentions marked PROP",
        "gold": "capitalised tokens inside PROP mentions",
        "seed": seed,
        "split": {name: [novel.name for novel in part] for name, part in novels.items()},
        "fitted_on": "train and validation; penalty and threshold chosen on validation",
        "penalty": {name: fit.penalty for name, fit in fits.items()},
        "validation_f1": {name: round(fit.validation_f1, 4) for name, fit in fits.items()},
        "test_f1": {
            name: round(score_probe(fit.probe, novels["test"]).f1, 4) for name, fit in fits.items()
        },
    }


def _score_table(novels: "list[Novel]", file: Path | None, split: str) -> Table:
    from vort.layers.entity_probe.scoring import score_probe

    table = Table(title=f"Tokens of proper names in {len(novels)} {split} novels")
    for heading in ("probe", "looks ahead", "precision", "recall", "F1", "F1, whole mentions"):
        table.add_column(heading, justify="left" if heading == "probe" else "right")
    for name, probe in _probes(file).items():
        score = score_probe(probe, novels)
        whole = score_probe(probe, novels, whole_mentions=True)
        ahead = "no" if getattr(probe, "causal", False) else "yes"
        table.add_row(name, ahead, *_figures(score), f"{whole.f1:.3f}")
    return table


def _figures(score: "Score") -> tuple[str, str, str]:
    return f"{score.precision:.3f}", f"{score.recall:.3f}", f"{score.f1:.3f}"


def _probes(file: Path | None) -> "dict[str, EntityProbe]":
    from vort.layers.entity_probe import LinearProbe, RuleProbe

    source = _shipped_file() if file is None else file
    return {
        "RuleProbe": RuleProbe(),
        "RuleProbe, causal": RuleProbe(causal=True),
        "LinearProbe": LinearProbe.load(source),
        "LinearProbe, causal": LinearProbe.load(source, causal=True),
    }
