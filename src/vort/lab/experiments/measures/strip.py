"""A stretch of one test sequence, token by token: what each is and how long it is kept."""

from typing import Any

from torch import Tensor

from vort.lab.experiments.measures.kinds import kinds_of
from vort.lab.experiments.measures.look import look

__all__ = ["strip"]


def strip(
    model: Any, task: Any, config: Any, *, positions: int = 120, sequences: int = 8
) -> dict[str, Any]:
    """Orders and write gates of consecutive test positions, where the most is remembered.

    Of the first test sequences the stretch is taken that shows the most whole pairs (a source and
    the query that asks for it), then the most tokens of the first kind of `kinds_of`.

    Args:
        model: trained.
        task: as trained on.
        config: of the training.
        positions: length of the stretch.
        sequences: how many test sequences to choose from.

    Returns:
        "sequence" and "start": where it is; "kinds": one name a position; "sources": for each
        query the place of its answer within the stretch, None elsewhere; "text": the characters,
        where tokens are characters; "layers": "order" and "gate" of each, one row a head.
    """
    batch = task.batch("test", range(min(sequences, task.size("test") or sequences)))
    kinds = kinds_of(task, batch)
    row, start = _fullest(next(iter(kinds.values())), batch["sources"], positions)
    part = slice(start, start + positions)
    one = {name: x[row : row + 1] for name, x in batch.items()}
    sources = one["sources"][0, part].long() - start
    found = {
        "sequence": row,
        "start": start,
        "kinds": [_kind(kinds, row, start + t) for t in range(len(sources))],
        "sources": [x if x >= 0 else None for x in sources.tolist()],
        "layers": [
            {name: _rounded(x[0, part]) for name, x in (("order", seen.order), ("gate", seen.gate))}
            for seen in look(model, one, config)
        ],
    }
    if not hasattr(task, "vocabulary"):
        found["text"] = bytes(one["input_ids"][0, part].tolist()).decode("latin-1")
    return found


def _kind(kinds: dict[str, Tensor], row: int, position: int) -> str:
    return next(name for name, member in kinds.items() if member[row, position])


def _fullest(first: Tensor, sources: Tensor, positions: int) -> tuple[int, int]:
    """Row and start of the window with the most pairs inside, then the most tokens in `first`."""
    length = first.shape[1]
    best, place = (-1, -1), (0, 0)
    for row in range(first.shape[0]):
        queries = (sources[row] >= 0).nonzero().flatten()
        answers = sources[row, queries].long()
        for start in range(max(1, length - positions + 1)):
            inside = (answers >= start) & (queries < start + positions)
            score = int(inside.sum()), int(first[row, start : start + positions].sum())
            if score > best:
                best, place = score, (row, start)
    return place


def _rounded(values: Tensor) -> list[list[float]]:
    """`[T, H]` as one list a head, to four places."""
    return [[round(x, 4) for x in head] for head in values.T.tolist()]
