"""What is measured on a trained model of long texts: needle maps, merged memories, whole answers.

Each of these goes on where it was stopped: what is finished is kept in the folder of a cell.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from vort.files import read_regular, write_atomically
from vort.lab.evaluation import exact_matches, judged_answers, read_long
from vort.lab.experiments.measures import precision_of
from vort.lab.tasks import SYNTHETIC, Batch, answers_right
from vort.models.decoding import is_steady

__all__ = [
    "answers_by_bucket",
    "decoding_times",
    "merged_bits",
    "merged_needles",
    "needle_map",
    "ruler_table",
]

# Tokens of a piece of all sequences of a batch; on a CPU, of whole texts.
_TOKENS = {"cuda": 1 << 18, "cpu": 1 << 15}
_PIECE = 4096
# A memory that grows is read at once, a policy of tokens kept all sequences together.
_AT_ONCE = {"cuda": 1 << 18, "cpu": 1 << 15}
# Tokens that are decoded to be timed, and before that.
_TIMED = 64
_BEFORE = 4096
_SHORT = 1024


class _Kept:
    """Results by name in a file, each written as it is found; None: nowhere."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        try:
            self.found: dict[str, Any] = {} if path is None else json.loads(read_regular(path))
        except (OSError, ValueError):
            self.found = {}

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        """What is kept under a name, made now if it is not there."""
        if name not in self.found:
            self.found[name] = make()
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self.path, json.dumps(self.found))
        return self.found[name]


def _kept(folder: Path | None, name: str) -> _Kept:
    return _Kept(None if folder is None else folder / f"{name}.json")


def _room(model: Any, length: int) -> tuple[int, int]:
    """Tokens of a batch of texts, and of a piece, that a model can read on its device."""
    device = next(model.parameters()).device.type
    if model.base_model.new_cache().grows:
        return _AT_ONCE[device], _PIECE
    if any(getattr(m, "heavy_hitters", None) is not None for m in model.base_model.memories):
        # Token by token: a GPU takes as long for a step of many sequences as for one of few.
        return 1024 * _TOKENS[device], _PIECE // 4
    pieces = max(1, length // _PIECE) if device == "cuda" else 1
    return pieces * _TOKENS[device], _PIECE


def _state(model: Any, length: int) -> int:
    return sum(block.self_attn.state_size(length) for block in model.model.layers)


@torch.no_grad()
def needle_map(
    model: Any,
    task: Any,
    config: Any,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    sequences: int,
    needles: int | None = None,
    state_numbers: int | None = None,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Of which needles a model finds all, by length of the text and depth of a needle.

    Args:
        model: trained; with `state_numbers` it is changed.
        task: `MultiNeedle` as trained on, whatever its length.
        config: of the training.
        lengths: of texts, short ones first.
        depths: from 0 to 1.
        sequences: for each length and number of needles.
        needles: in texts with several; None: as many as there were at most in training.
        state_numbers: that a layer of full attention may keep for a sequence by H2O's policy;
            None: all.
        folder: where finished lengths are kept.

    Returns:
        "one" and "all" (of several) by length: `right` and `asked`, sequences by depth of a needle
        (one of them, where there are several), `whole` of all `sequences`, and right `answers`;
        "state_numbers" by length.
    """
    if state_numbers is not None:
        _keep_heavy_hitters(model, state_numbers)
    model.eval()
    kept = _kept(folder, "needles" if state_numbers is None else "h2o_needles")
    several = task.needles if needles is None else needles
    asked: dict[str, dict[str, Any]] = {
        "one": {"needles": 1, "asked": "one"},
        "all": {"needles": several, "asked": "all"},
    }
    found: dict[str, Any] = {"depths": list(depths), "needles": several}
    for kind, settings in asked.items():
        found[kind] = {}
        for length in lengths:
            longer = replace(
                task,
                length=length,
                mixed=(),
                needles_from=None,
                depths=tuple(depths),
                test_sequences=sequences,
                **settings,
            )
            with precision_of(config):
                found[kind][str(length)] = kept.get(
                    f"{kind} {length}", partial(_by_depth, model, longer)
                )
    found["state_numbers"] = {str(length): _state(model, length) for length in lengths}
    return found


def _keep_heavy_hitters(model: Any, state_numbers: int) -> None:
    for block in model.model.layers:
        memory = block.self_attn.memory
        budget = state_numbers // (memory.num_heads * (2 * memory.head_dim + 2))
        memory.keep_heavy_hitters(max(2, budget))


def _by_depth(model: Any, task: Any) -> dict[str, Any]:
    """Sequences that are right whole, by the depths of what they ask for."""
    tokens, piece = _room(model, task.length)
    count, places = task.test_sequences, len(task.depths)
    right, asked = [0] * places, [0] * places
    whole = answers = 0
    for found in judged_answers(model, task, count, tokens=tokens, piece=piece):
        answers += int(found[:, 2].sum())
        for row in found[:, 0].unique().tolist():
            of_row = found[found[:, 0] == row]
            good = int(of_row[:, 2].all())
            whole += good
            for place in of_row[:, 1].unique().tolist():
                right[place] += good
                asked[place] += 1
    return {
        "right": right,
        "asked": asked,
        "whole": whole,
        "sequences": count,
        "answers": answers,
    }


@torch.no_grad()
def decoding_times(
    model: Any, lengths: Sequence[int], *, timed: int = _TIMED, state_numbers: int | None = None
) -> dict[str, Any]:
    """Milliseconds of a token, one sequence alone, and what is kept for it, by length before it.

    What does not grow takes as long after any text, and is timed once, as `generate` does it. A
    cache that grows is filled by laying a short one end to end: what it says is of no interest, and
    reading so far would take the room of all pairs. H2O's is timed like it, once it is full.

    Args:
        model: where it is to be timed; its weights make no difference.
        lengths: of what was read before.
        timed: tokens.
        state_numbers: see `needle_map`.
    """
    if state_numbers is not None:
        _keep_heavy_hitters(model, state_numbers)
    model.eval()
    if state_numbers is not None:
        times = dict.fromkeys(lengths, _with_full_cache(model, _SHORT, timed))
    elif model.base_model.new_cache().grows:
        times = {length: _with_full_cache(model, length, timed) for length in lengths}
    else:
        times = dict.fromkeys(lengths, _by_generation(model, min(*lengths, _BEFORE), timed))
    grows = state_numbers is not None or model.base_model.new_cache().grows
    return {
        "recorded": model.device.type == "cuda" and not grows and is_steady(model),
        "ms_per_token": {str(length): time for length, time in times.items()},
        "state_numbers": {str(length): _state(model, length) for length in lengths},
    }


def _by_generation(model: Any, length: int, timed: int) -> float:
    device = next(model.parameters()).device
    prompt = torch.zeros(1, length, dtype=torch.long, device=device)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    times: list[float] = []

    class Clock:
        """A streamer: told of the prompt first, then of every token."""

        def put(self, value: Any) -> None:
            times.append(_now(device))

        def end(self) -> None:
            pass

    for _ in range(2):  # once, so that kernels are compiled and steps recorded
        times.clear()
        model.generate(prompt, max_new_tokens=1 + timed, streamer=Clock(), **options)
    first, *_, last = times[1:]
    return 1e3 * (last - first) / timed


def _with_full_cache(model: Any, longest: int, timed: int) -> float:
    device, base = next(model.parameters()).device, model.base_model
    short, cache = min(longest, _SHORT), base.new_cache()
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    given = {"past_key_values": cache, "use_cache": True}
    base(input_ids=token.expand(1, short), **given)
    for index in range(cache.num_layers):
        state = dict(cache.load_state(index))
        if "memory.k" not in state or "memory.score" in state:  # it does not grow
            continue
        for name in ("memory.k", "memory.v"):
            state[name] = state[name].repeat(1, longest // short, 1, 1)
        state["memory.seen"] = torch.full_like(state["memory.seen"], longest // short * short)
        cache.store_state(index, state, 0)
    for _ in range(3):
        base(input_ids=token, **given)
    began = _now(device)
    for _ in range(timed):
        base(input_ids=token, **given)
    return 1e3 * (_now(device) - began) / timed


def _now(device: torch.device) -> float:
    """The time, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


@torch.no_grad()
def merged_needles(
    model: Any,
    task: Any,
    config: Any,
    *,
    length: int,
    documents: Sequence[int],
    sequences: int,
    needles: int | None = None,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Needles in a text that is cut into documents: read in a row, and apart and merged.

    Every text has `needles` facts that are asked for at its end. Up to the question it is cut
    into documents of about equal length, at ends of sentences. Read apart, none of them knows of
    the others; their memories are put together as if they had been read in a row, and the question
    is read with what comes of it.

    Args:
        model: trained; its memory must be one that can be aged.
        task: `MultiNeedle` as trained on.
        config: of the training.
        length: of a text with its question.
        documents: into how many a text is cut.
        sequences: texts.
        needles: in a text; None: as many as there were at most in training.
        folder: where what is finished is kept.

    Returns:
        "row", and "merged" by number of documents: `answers` that are right, and sequences that are
        right `whole`, with how many there were.
    """
    model.eval()
    kept = _kept(folder, "merged_needles")
    longer = replace(
        task,
        length=length,
        mixed=(),
        needles_from=None,
        asked="all",
        needles=task.needles if needles is None else needles,
        test_sequences=sequences,
    )

    def judged(cut: int | None) -> dict[str, int]:
        counts = {"answers": 0, "asked": 0, "whole": 0, "sequences": 0}
        together = max(1, _room(model, length)[0] // length)
        for begin in range(0, sequences, together):
            batch = longer.batch("test", range(begin, min(begin + together, sequences)))
            found = answers_right(batch, _read_cut(model, longer, batch, cut))
            rows = len(batch["input_ids"])
            counts["answers"] += int(found[:, 2].sum())
            counts["asked"] += len(found)
            counts["whole"] += sum(int(found[found[:, 0] == row, 2].all()) for row in range(rows))
            counts["sequences"] += rows
        return counts

    with precision_of(config):
        return {
            "length": length,
            "row": kept.get("row", partial(judged, None)),
            "merged": {str(cut): kept.get(str(cut), partial(judged, cut)) for cut in documents},
        }


def _read_cut(model: Any, task: Any, batch: Batch, documents: int | None) -> Tensor:
    """`read_long` of texts that are cut up to their question; None: read in a row."""
    if documents is None:
        return read_long(model, batch, task.num_classes, piece=_PIECE)
    stop, line = (int(task.coder.encode(text)[-1]) for text in (".", "\n"))
    ids = batch["input_ids"]
    # The question is the last line.
    first = int((ids == line).int().flip(1).argmax(1).max())
    first = ids.shape[1] - 1 - first
    cache = _merged_cache(model, ids[:, :first], _cuts(ids[:, :first] == stop, documents))
    given: Any = batch
    rest: Any = {name: x[:, first:] for name, x in given.items()}
    predicted = torch.full_like(batch["labels"], -1)
    predicted[:, first:] = read_long(model, rest, task.num_classes, piece=_PIECE, cache=cache)
    return predicted


def _cuts(ends: Tensor, documents: int) -> Tensor:
    """`[B, documents + 1]`: where texts are cut, at the sentence ends nearest to equal parts.

    ends: `[B, T]`, true at the last token of a sentence; a fact is a sentence, and stays whole.
    """
    rows, length = ends.shape
    places = [torch.cat([torch.tensor([0]), row.nonzero().flatten() + 1]) for row in ends]
    wanted = torch.arange(1, documents) * length / documents
    cuts = [found[(found[:, None] - wanted).abs().argmin(0)] for found in places]
    inner = torch.stack(cuts)
    edge = torch.zeros(rows, 1, dtype=inner.dtype)
    return torch.cat([edge, inner, edge + length], 1)


def _merged_cache(model: Any, tokens: Tensor, bounds: Tensor) -> Any:
    """The memory of texts `[B, T]` whose documents were read apart; `bounds` `[B, documents + 1]`.

    Documents of a batch end together: shorter ones are filled up before their beginning.
    """
    from vort.models.merging import merged

    device, caches, ages = next(model.parameters()).device, [], []
    for begin, end in zip(bounds[:, :-1].T, bounds[:, 1:].T, strict=True):
        width = max(1, int((end - begin).max()))
        places = end[:, None] - width + torch.arange(width)
        real = places >= begin[:, None]
        cache = model.base_model.new_cache()
        given = {"input_ids": tokens.gather(1, places.clamp(min=0)).to(device)}
        if not real.all():
            given["attention_mask"] = real.long().to(device)
        model.base_model(**given, past_key_values=cache, use_cache=True)
        caches.append(cache)
        ages.append(tokens.shape[1] - end)
    return merged(model, caches, ages)


@torch.no_grad()
def merged_bits(
    model: Any,
    task: Any,
    config: Any,
    *,
    read: int,
    documents: Sequence[int],
    windows: int,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Bits of what follows a text, with a memory of it read in a row, apart and merged, or not.

    Args:
        model: trained on books.
        task: `Books`; the first `read` characters of a window are memory, the rest is scored.
        config: of the training.
        read: characters that are read first.
        documents: into how many these are cut.
        windows: of each test book, spread over it.
        folder: where what is finished is kept.

    Returns:
        Bits a character of the rest, window by window: after a text read in a "row", "merged" by
        number of documents, and after "nothing". "books": whose window each is.
    """
    model.eval()
    kept = _kept(folder, "merged_bits")
    base, head = model.base_model, model.get_output_embeddings()
    device = next(model.parameters()).device
    places = task.within_documents("test", task.length, most=windows)

    def bits(cut: int | None) -> list[float]:
        found: list[float] = []
        together = max(1, _room(model, task.length)[0] // task.length)
        for begin in range(0, len(places), together):
            batch = task.batch_at("test", places[begin : begin + together], task.length)
            ids, labels = batch["input_ids"], batch["labels"][:, read:].to(device)
            cache = base.new_cache()
            if cut is not None:
                even = torch.linspace(0, read, cut + 1).round().long()
                cache = _merged_cache(model, ids[:, :read], even.expand(len(ids), -1))
            given = {"past_key_values": cache, "use_cache": True}
            hidden = base(input_ids=ids[:, read:].to(device), **given)[0]
            logits = head(hidden)[..., : task.num_classes].float().transpose(1, 2)
            loss = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
            found += (loss.mean(1) / math.log(2)).tolist()
        return found

    with precision_of(config):
        return {
            "read": read,
            "scored": task.length - read,
            "books": [book for book, _ in places],
            "nothing": kept.get("nothing", partial(bits, None)),
            "row": kept.get("1", partial(bits, 1)),
            "merged": {str(cut): kept.get(str(cut), partial(bits, cut)) for cut in documents},
        }


def answers_by_bucket(
    model: Any, task: Any, config: Any, *, sequences: int | None = None
) -> dict[str, Any]:
    """Share of test answers that are right whole, by bucket; see `exact_matches`."""
    size = config.evaluation_batch_size or config.batch_size
    count = task.size("test") if sequences is None else sequences
    with precision_of(config):
        return dict(exact_matches(model, task, "test", sequences=count, batch_size=size))


@torch.no_grad()
def ruler_table(
    model: Any,
    task: Any,
    config: Any,
    *,
    lengths: Sequence[int],
    sequences: int,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Answers of RULER's eleven synthetic tasks that are right whole, by task and length.

    Args:
        model: trained on all of them.
        task: `Ruler` with kind "all".
        config: of the training.
        lengths: of texts.
        sequences: for each length, the tasks in turn.
        folder: where finished lengths are kept.

    Returns:
        By length and task: right answers and how many were asked.
    """
    model.eval()
    kept = _kept(folder, "ruler")

    def table(length: int) -> Mapping[str, list[int]]:
        longer = replace(task, length=length, mixed=(), test_sequences=sequences)
        tokens, piece = _room(model, length)
        counts: dict[str, list[int]] = {name: [0, 0] for name in SYNTHETIC}
        for found in judged_answers(model, longer, sequences, tokens=tokens, piece=piece):
            for _, bucket, right in found.tolist():
                counts[SYNTHETIC[bucket]][0] += right
                counts[SYNTHETIC[bucket]][1] += 1
        return counts

    with precision_of(config):
        scores = {str(length): kept.get(str(length), partial(table, length)) for length in lengths}
    numbers = {str(length): _state(model, length) for length in lengths}
    return {"scores": scores, "state_numbers": numbers}
