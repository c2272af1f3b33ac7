"""`vort lens`: a page that shows which tokens a model keeps, for how long, and who reads them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from vort.files import read_regular, write_atomically
from vort.lab.commands import (
    Device,
    Model,
    as_utf8,
    check_page,
    find_model,
    has_vort,
    load_model,
    named_or_shipped,
    read_device,
    replaced_in_words,
    say,
    say_horizon,
)

if TYPE_CHECKING:
    import torch

    from vort.lab.report.lens import LensText
    from vort.models import VortForCausalLM
    from vort.sessions import BareModel

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
    if out.exists() and out.samefile(text):
        raise typer.BadParameter(f"--out must be another file than --text, got {out}")
    check_page(out, "--out")
    name = named_or_shipped(model)
    loaded, tokenizer = _open(name, device)
    with console.status("reading the text"):
        titled = as_utf8(title or text.name)
        page, notes = _page(loaded, tokenizer, text, max_tokens, titled, name)
    for note in notes:
        typer.echo(note, err=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page)
    size = out.stat().st_size / 1e6
    say(console, "lens: ", (str(out), "bold"), f" ({size:.1f} MB)")


class _ByteOffsets:
    """What the lens asks of a tokenizer, where tokens are bytes."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[Any]]:
        """Bytes, and the character that each is of."""
        sizes = [len(character.encode()) for character in text]
        offsets = [(at, at + 1) for at, size in enumerate(sizes) for _ in range(size)]
        return {"input_ids": list(text.encode()), "offset_mapping": offsets}


def _open(name: str, device: str) -> "tuple[VortForCausalLM | BareModel, Any]":
    """A model and its tokenizer; without Hugging Face, which takes seconds, where that will do."""
    if read_device(device) == "cpu":
        from vort.sessions import read_bare

        bare = read_bare(find_model(name))
        if bare is not None:
            return bare, _ByteOffsets()
    return load_model(name, device)


def _page(
    model: Any,
    tokenizer: Any,
    file: Path,
    max_tokens: int,
    title: str,
    name: str,
) -> tuple[str, Sequence[str]]:
    """The page, and what is to be said of it."""
    import torch

    from vort.lab.report.lens import lens_page, memory_in_words, view_text
    from vort.lab.report.provenance import provenance

    memories = [block.self_attn.memory for block in model.model.layers]
    settings = memories[0].settings
    told = any(memory.needs_entity for memory in memories)
    source, ids = _read(tokenizer, file, max_tokens, told)
    marks = None if source.marks is None else torch.from_numpy(source.marks)[None].to(model.device)
    say_horizon(model, ids.shape[1])
    view = view_text(model, ids.to(model.device), marks)
    made_by = provenance()
    routing = f", {settings.routing} routing" if has_vort(model.config) else ""
    about = {
        "model": name,
        "memory": memory_in_words(model) + routing,
        "features": f"{settings.feature_map}, {view.layers[0].q.shape[-1]} for each head",
        "normaliser": settings.normalizer,
        "horizon": f"{model.config.horizon:,} tokens",
        "made with": f"vort {made_by['vort']}, torch {made_by['torch']}",
        "command": made_by["command"],
    }
    return lens_page(source, view, title=title, about=about), source.notes


def _read(
    tokenizer: Any, file: Path, max_tokens: int, needs_entity: bool
) -> "tuple[LensText, torch.Tensor]":
    """The text beside its tokens, and these as `[1, T]`."""
    import torch

    from vort.lab.report.lens import LensText
    from vort.layers.entity_probe import LinearProbe, entity_indicator

    text = read_regular(file).decode("utf-8", errors="replace")
    notes = replaced_in_words(text)
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
    marks = entity_indicator(kept, offsets, probe, causal=True).numpy() if needs_entity else None
    source = LensText(kept, offsets, probe.probe(kept), marks, notes)
    return source, torch.tensor([batch["input_ids"][: len(offsets)]])
