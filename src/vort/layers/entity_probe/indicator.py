"""Entity names as a 0/1 indicator per token, for any tokenizer that knows its offsets."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vort.layers.entity_probe.probes import EntityProbe, Span, shipped_probe
from vort.layers.entity_probe.words import settled_at

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase

Offsets = Sequence[Span] | Sequence[Sequence[int]] | Tensor | NDArray[np.int64]


def entity_indicator(
    text: str, offsets: Offsets, probe: EntityProbe | None = None, *, causal: bool = False
) -> Tensor:
    """1 for every token that belongs to an entity's name, else 0: `[T]`, float32.

    A token belongs to a name when it shares a character with it; zero-width tokens (specials,
    padding) never do.

    Marking the first letter of a name tells a language model what comes next. With `causal=True`
    the mark stands on the first token at which the name is known to be over (the space or comma
    after it), and only probes that promise `causal` are taken: the indicator of a token then
    depends on the text up to that token alone, and can be computed while generating.

    Args:
        text: what was tokenized.
        offsets: `[T, 2]`, characters `(start, end)` of every token.
        probe: finds the names; the shipped `LinearProbe` unless given.
        causal: never look ahead.

    >>> from vort.layers.entity_probe import RuleProbe
    >>> text = "then Mary sang"
    >>> entity_indicator(text, [(0, 0), (0, 4), (5, 9), (10, 14)], RuleProbe())
    tensor([0., 0., 1., 0.])
    >>> letters = [(i, i + 1) for i in range(len(text))]
    >>> entity_indicator(text, letters, RuleProbe(causal=True), causal=True).nonzero().item()
    9
    """
    probe = shipped_probe(causal) if probe is None else probe
    starts, ends = _check_offsets(offsets, len(text))
    if not causal:
        return _overlapping(probe.probe(text), starts, ends, len(text))
    if not getattr(probe, "causal", False):
        raise ValueError(
            f"causal=True needs a probe that never looks ahead (probe.causal is True), "
            f"got {type(probe).__name__}"
        )
    settled = [settled_at(text, end) for _, end in probe.probe(text)]
    return _at_characters([index for index in settled if index is not None], starts, ends)


def encode_with_entities(
    tokenizer: "PreTrainedTokenizerBase",
    texts: str | Sequence[str],
    probe: EntityProbe | None = None,
    *,
    causal: bool = False,
    **tokenizer_kwargs: Any,
) -> "BatchEncoding":
    """The tokenizer's batch with `entity_mask` `[B, T]` beside `input_ids`.

    Args:
        tokenizer: a Hugging Face tokenizer that returns offsets (every fast one, `ByteTokenizer`).
        texts: one text or several; one text gives a batch of one.
        probe: finds the names; the shipped `LinearProbe` unless given.
        causal: never look ahead, see `entity_indicator`.
        **tokenizer_kwargs: passed on (`padding`, `truncation`, `max_length`, ...); texts of
            different lengths need `padding=True`.
    """
    batch_of_texts = [texts] if isinstance(texts, str) else list(texts)
    tokenizer_kwargs.setdefault("return_tensors", "pt")
    batch: BatchEncoding = tokenizer(
        batch_of_texts, return_offsets_mapping=True, **tokenizer_kwargs
    )
    if "offset_mapping" not in batch:
        raise ValueError(
            f"tokenizer must return offsets, got {type(tokenizer).__name__}, which does not; "
            "take a fast tokenizer or ByteTokenizer"
        )
    offsets = batch.pop("offset_mapping")
    rows = [
        entity_indicator(text, row, probe, causal=causal)
        for text, row in zip(batch_of_texts, offsets, strict=True)
    ]
    as_tensors = isinstance(batch["input_ids"], Tensor)
    batch["entity_mask"] = torch.stack(rows) if as_tensors else [row.tolist() for row in rows]
    return batch


def _check_offsets(offsets: Offsets, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    pairs = np.asarray(offsets, dtype=np.int64)
    if pairs.size == 0:
        pairs = pairs.reshape(0, 2)
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ValueError(f"offsets must have shape [T, 2], got {list(pairs.shape)}")
    starts, ends = pairs[:, 0], pairs[:, 1]
    wrong = np.flatnonzero((starts < 0) | (ends < starts) | (ends > length))
    if wrong.size:
        first = int(wrong[0])
        raise ValueError(
            f"offsets must satisfy 0 <= start <= end <= {length} (the length of text), "
            f"got {tuple(pairs[first].tolist())} at index {first}"
        )
    return starts, ends


def _overlapping(
    spans: list[Span], starts: NDArray[np.int64], ends: NDArray[np.int64], length: int
) -> Tensor:
    named = np.zeros(length + 1, dtype=np.int64)
    for start, end in spans:
        named[start + 1 : end + 1] = 1
    before = np.cumsum(named)
    return torch.from_numpy((before[ends] > before[starts]).astype(np.float32))


def _at_characters(
    characters: list[int], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> Tensor:
    """Mark, for each character, the last token that covers it, else the next token.

    The last, because several tokens may share a character (the bytes of one letter) and the
    character is known only when all are read; the next, where the tokenizer drops white space.
    """
    marks = np.zeros(len(starts), dtype=np.float32)
    solid = np.flatnonzero(ends > starts)
    begins, finishes = starts[solid], ends[solid]
    for character in characters:
        position = int(np.searchsorted(begins, character, side="right")) - 1
        if position < 0 or finishes[position] <= character:
            position += 1
        if position < len(solid):
            marks[solid[position]] = 1.0
    return torch.from_numpy(marks)
