"""`vort lens`: a page that shows which tokens a model keeps, for how long, and who reads them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from vort.files import read_regular, write_atomically
from vort.lab.commands import (
    Device,
    Model,
    check_writable,
    has_vort,
    load_model,
    named_or_shipped,
    say_horizon,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from vort.lab.report.lens import LensText
    from vort.models import VortForCausalLM

console = Console()


def lens(
    text: Annotated[Path, typer.Option(help="The text to look at, UTF-8.")],
    model: Model = None,
    out: Annotated[Path, typer.Option(help="Page to write.")] = Path("lens.html"),
    max_tokens: Annotated[int, typer.Option(help="Cut the text after so many tokens.")] = 5000,
    title: Annotated[str | None, typer.Option(help="Of the page; the file's name if absent.")] = (
        None
    ),
    device: Device = "cpu",
) -> None:
    """Write one self-contained HTML page: the text, coloured by what a model remembers of it."""
    if max_tokens < 2:
        raise typer.BadParameter(f"--max-tokens must be at least 2, got {max_tokens}")
    if not text.is_file():
        raise typer.BadParameter(f"--text must be a file, got {text}")
    check_writable(out, "--out")
    name = named_or_shipped(model)
    loaded, tokenizer = load_model(name, device)
    with console.status("reading the text"):
        page, notes = _page(loaded, tokenizer, text, max_tokens, title or text.name, name)
    for note in notes:
        typer.echo(note, err=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page)
    size = out.stat().st_size / 1e6
    console.print(f"lens: [bold]{out}[/bold] ({size:.1f} MB)", highlight=False)


def _page(
    model: "VortForCausalLM",
    tokenizer: "PreTrainedTokenizerBase",
    file: Path,
    max_tokens: int,
    title: str,
    name: str,
) -> tuple[str, Sequence[str]]:
    """The page, and what is to be said of it."""
    import torch

    from vort.lab.report.folder import provenance
    from vort.lab.report.lens import lens_page, view_text

    source, ids = _read(tokenizer, file, max_tokens, model.config.use_entity)
    marks = None if source.marks is None else torch.from_numpy(source.marks)[None].to(model.device)
    say_horizon(model, ids.shape[1])
    view = view_text(model, ids.to(model.device), marks)
    config, made_by = model.config, provenance()
    about = {
        "model": name,
        "memory": config.memory_in_words()
        + (f", {config.routing} routing" if has_vort(config) else ""),
        "features": f"{config.feature_map}, {view.layers[0].q.shape[-1]} for each head",
        "normaliser": config.normalizer,
        "horizon": f"{config.horizon:,} tokens",
        "made with": f"vort {made_by['vort']}, torch {made_by['torch']}",
        "command": made_by["command"],
    }
    return lens_page(source, view, title=title, about=about), source.notes


def _read(
    tokenizer: "PreTrainedTokenizerBase", file: Path, max_tokens: int, use_entity: bool
) -> "tuple[LensText, torch.Tensor]":
    """The text beside its tokens, and these as `[1, T]`."""
    import torch

    from vort.lab.report.lens import LensText
    from vort.layers.entity_probe import LinearProbe, entity_indicator

    text = read_regular(file).decode("utf-8", errors="replace")
    notes = []
    if "\ufffd" in text:
        notes.append(f"{text.count(chr(0xFFFD))} places are no UTF-8 and read as U+FFFD.")
    # Tokens are seldom longer than 16 characters: what lies far beyond the cut is left alone.
    batch = tokenizer(text[: 16 * max_tokens], return_offsets_mapping=True)
    if "offset_mapping" not in batch:
        raise ValueError(
            f"the model's tokenizer must return offsets, {type(tokenizer).__name__} does not; "
            "take a fast tokenizer or ByteTokenizer"
        )
    offsets = [(int(start), int(end)) for start, end in batch["offset_mapping"]][:max_tokens]
    if not offsets:
        raise ValueError(f"--text must hold at least one character, {file} is empty")
    kept = text[: max(end for _, end in offsets)]
    if len(kept) < len(text):
        share = f"{len(kept):,} of its {len(text):,} characters"
        notes.append(f"The text is cut after {len(offsets):,} tokens, {share} (--max-tokens).")
    probe = LinearProbe.pretrained(causal=True)
    marks = entity_indicator(kept, offsets, probe, causal=True).numpy() if use_entity else None
    source = LensText(kept, offsets, probe.probe(kept), marks, notes)
    return source, torch.tensor([batch["input_ids"][: len(offsets)]])
