"""Answers of several tokens that are right only if all of them are; long texts read in pieces."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vort.lab.evaluation.writing import PIECE
from vort.lab.tasks import Batch, Split, Task, answers_right
from vort.lab.training.data import compact
from vort.lab.training.scorer import Scorer

__all__ = ["exact_matches", "judged_answers", "read_long"]


@torch.no_grad()
def exact_matches(
    model: nn.Module,
    task: Task,
    split: Split = "test",
    *,
    sequences: int | None = None,
    batch_size: int = 8,
) -> dict[str, dict[str, float]]:
    """Share of answers that are right whole, by bucket and for "all"; and of sequences.

    A sequence is right if all its answers are. Answers are compared given what stands before each
    of their tokens: a model that writes by itself gets exactly these right, up to its first error.
    """
    size = task.size(split)
    count = min(x for x in (sequences, size, 1000 if size is None else size) if x is not None)
    for name, value in (("sequences", count), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    training = model.training
    model.eval()
    scorer = Scorer(model, task.num_classes)
    buckets: dict[int, list[int]] = {}
    rows: list[bool] = []
    for begin in range(0, count, batch_size):
        indices = range(begin, min(begin + batch_size, count))
        batch = task.batch(split, indices)
        found = answers_right(batch, _predicted(scorer, batch))
        for bucket, right in found[:, 1:].tolist():
            buckets.setdefault(bucket, []).append(right)
        # Samples that stand apart are rows of their own.
        whole = range(len(batch["input_ids"]))
        rows += [bool(found[found[:, 0] == row, 2].all()) for row in whole]
    model.train(training)
    named = {task.bucket_names[bucket]: buckets[bucket] for bucket in sorted(buckets)}
    named["all"] = [right for found in buckets.values() for right in found]
    named["sequences"] = [int(right) for right in rows]
    return {
        name: {"exact": sum(right) / len(right), "count": float(len(right))}
        for name, right in named.items()
    }


def _predicted(scorer: Scorer, batch: Batch) -> Tensor:
    """`[B, T]`: the likeliest class where something is asked, -1 elsewhere."""
    small = compact(batch)
    device = next(scorer.parameters()).device
    given: dict[str, Any] = {name: x.to(device) for name, x in small.items()}
    best = scorer(given)["logits"].argmax(-1).cpu()
    predicted = torch.full_like(batch["labels"], -1)
    predicted.view(-1)[small["positions"]] = best
    return predicted


@torch.no_grad()
def read_long(
    model: Any, batch: Batch, num_classes: int, *, piece: int = PIECE, cache: Any = None
) -> Tensor:
    """`[B, T]`: the likeliest class where something is asked, -1 elsewhere, of a long text.

    A model of ours whose memory does not grow reads `piece` tokens at a time, so that a text of any
    length takes the room of a piece. One whose memory grows has to keep the text in any case, and
    reads it at once, where attention is fused.

    Args:
        model: a `VortForCausalLM`; its head sees no more than what is asked.
        batch: of a task.
        num_classes: of the task.
        piece: tokens at a time.
        cache: what was read before, of as many rows; it is changed. None: nothing.
    """
    if piece < 1:
        raise ValueError(f"piece must be at least 1, got {piece}")
    base, head = model.base_model, model.get_output_embeddings()
    device = next(model.parameters()).device
    tokens, asked = batch["input_ids"], batch["labels"] >= 0
    predicted = torch.full_like(batch["labels"], -1)
    fresh = cache is None
    cache = base.new_cache() if fresh else cache
    whole = fresh and cache.grows
    step = tokens.shape[1] if whole else piece
    for begin in range(0, tokens.shape[1], step):
        part = slice(begin, begin + step)
        given = {"use_cache": False} if whole else {"past_key_values": cache, "use_cache": True}
        hidden = base(input_ids=tokens[:, part].to(device), **given)[0]
        where = asked[:, part]
        if where.any():
            logits = head(hidden[where.to(device)])[:, :num_classes]
            predicted[:, part][where] = logits.argmax(-1).cpu()
    return predicted


def judged_answers(
    model: Any, task: Task, count: int, *, tokens: int, piece: int = PIECE
) -> Iterator[Tensor]:
    """What `answers_right` says of the test split, a batch at a time; rows are test sequences.

    Args:
        model: as for `read_long`.
        task: of any length.
        count: sequences.
        tokens: of a batch; as many sequences as have no more, but one at the least.
        piece: see `read_long`.
    """
    together = max(1, tokens // task.length)
    for begin in range(0, count, together):
        batch = task.batch("test", range(begin, min(begin + together, count)))
        found = answers_right(batch, read_long(model, batch, task.num_classes, piece=piece))
        found[:, 0] += begin
        yield found
