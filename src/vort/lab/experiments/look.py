"""A close look at the memories of a trained model: orders, gates and read weights by token."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vort.lab.experiments.measures import extras_of, precision_of
from vort.ops.retention import retention
from vort.plasticity import memory_features, record_memories

__all__ = ["Look", "by_order", "impose_order", "look", "reads", "strip"]

BOUNDS = (3, 10, 30, 100, 300)
ORDERS = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
CLASSES = 10


class Look(NamedTuple):
    """The routing of one layer on a batch, on the CPU.

    Attributes:
        order: `[B, T, H]`.
        gate: `[B, T, H]`, share of a token that is written; ones where there is no gate.
        read: `[B, T, H, S]`, weights over scales that average 1; ones where there are none.
        rates: `[S]`, what each scale forgets in a step.
    """

    order: Tensor
    gate: Tensor
    read: Tensor
    rates: Tensor


@torch.no_grad()
def look(model: Any, batch: Any, config: Any) -> list[Look]:
    """Every layer's routing of a batch; the model's memories must be `VortMemory`."""
    return [_look(memory, inputs) for memory, inputs in _recorded(model, batch, config)]


def _recorded(model: Any, batch: Any, config: Any) -> list[tuple[Any, Any]]:
    """Every layer's memory and what it is given of a batch."""
    device = next(model.parameters()).device
    model.eval()
    ids = batch["input_ids"].to(device)
    with precision_of(config), record_memories(model) as found:
        model.model(ids, use_cache=False, **extras_of(model, batch, device))
    return [*found]


def _look(memory: Any, inputs: Any) -> Look:
    routing = memory.route(inputs)
    if routing.order is None:
        raise TypeError(f"memory must have orders, got {type(memory).__name__} without them")
    gate, read = memory.router.gates(inputs.hidden_states)
    order = routing.order.float().cpu()
    scales = (*order.shape, routing.log_decay.shape[-1])
    return Look(
        order,
        torch.ones_like(order) if gate is None else gate.float().cpu(),
        torch.ones(scales) if read is None else read.float().cpu(),
        -routing.log_decay.float().cpu(),
    )


def strip(
    model: Any, task: Any, config: Any, *, positions: int = 120, sequences: int = 8
) -> dict[str, Any]:
    """Orders and write gates of consecutive test positions, where the most is remembered.

    Of the first test sequences the stretch is taken that shows the most whole pairs (a source and
    the query that asks for it), then the most tokens of the first kind of `Task.kinds`.

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
    kinds = task.kinds(batch)
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
    if task.text:
        found["text"] = bytes(one["input_ids"][0, part].tolist()).decode("latin-1")
    return found


def _kind(kinds: dict[str, Tensor], row: int, position: int) -> str:
    return next(name for name, member in kinds.items() if member[row, position])


def _fullest(first: Tensor, sources: Tensor, positions: int) -> tuple[int, int]:
    """Row and start of the window with the most pairs inside, then the most tokens in `first`."""
    rows, length = first.shape
    starts = torch.arange(max(1, length - positions + 1))
    ends = (starts + positions).clamp(max=length)
    seen = torch.nn.functional.pad(first.long().cumsum(1), (1, 0))
    row, queries = (sources >= 0).nonzero(as_tuple=True)
    answers = sources[row, queries].long()
    # A pair is inside from where its query stands last until where its answer stands first.
    begins = (queries - positions + 1).clamp(min=0)
    row, begins, answers = (x[begins <= answers] for x in (row, begins, answers))
    change = torch.zeros(rows, length + 1, dtype=torch.long)
    change.index_put_((row, begins), torch.ones_like(row), accumulate=True)
    change.index_put_((row, answers + 1), -torch.ones_like(row), accumulate=True)
    pairs = change.cumsum(1)[:, starts]
    score = pairs * (positions + 1) + seen[:, ends] - seen[:, starts]
    best = int(score.flatten().numpy().argmax())  # the first of the best, which torch does not say
    return best // len(starts), best % len(starts)


def _rounded(values: Tensor) -> list[list[float]]:
    """`[T, H]` as one list a head, to four places."""
    return [[round(x, 4) for x in head] for head in values.T.tolist()]


@torch.no_grad()
def reads(model: Any, task: Any, config: Any, *, sequences: int = 16) -> dict[str, Any]:
    """What tokens read, by kind: of which time scales, and from tokens of which order.

    Kinds are those of `Task.kinds`; queries of generated tasks are split by the task's classes of
    their true lag, which the model is not told.

    Args:
        model: trained.
        task: as trained on.
        config: of the training.
        sequences: how many of the test split.

    Returns:
        "layers": of each, "time_constants" (steps until a scale has 1/e left, None: for ever) and
        "kinds": "count" of tokens and, one row a head, "shares" of the scales in the read weights
        and "levels": how p_it of eq. retrieval-loss, with all weights that the memory applies, is
        spread over tokens i by tenths of their order; "written": how orders of all tokens are.
        Levels and written are left out where features may be negative and p is no share, and
        so is the "levels" beside "layers", which says how many there are.
    """
    batch = task.batch("test", range(min(sequences, task.size("test") or sequences)))
    kinds = _query_kinds(task, batch)
    layers = []
    for memory, inputs in _recorded(model, batch, config):
        seen = _look(memory, inputs)
        layers.append(_of_layer(seen, _by_level(memory, inputs, seen.order, config), kinds))
    levels = {"levels": CLASSES} if all("written" in layer for layer in layers) else {}
    return {"layers": layers, **levels}


def _by_level(memory: Any, inputs: Any, order: Tensor, config: Any) -> tuple[Tensor, Tensor] | None:
    """Level of each token and what each query retrieves of every level, `[B, T, H, CLASSES]` both.

    Retrieval is the average of the values with p_it for weights, over i < t: one call of
    `retention`, where a token's value is its level.
    """
    if not memory.key_map.is_positive:
        return None
    member = (order * CLASSES).long().clamp(max=CLASSES - 1)
    level = torch.nn.functional.one_hot(member, CLASSES).float()
    with precision_of(config):
        routing = memory.route(inputs)
        q, k = memory_features(memory, inputs)
    found, _ = retention(
        q.float(),
        k.float(),
        level.to(q.device),
        routing.write,
        routing.log_decay,
        read=routing.read,
        normalizer="decayed",
        include_self=False,
    )
    return level, found.cpu()


def _query_kinds(task: Any, batch: Any) -> dict[str, Tensor]:
    """Kinds of tokens, with queries that have a source told apart by lag."""
    kinds: dict[str, Tensor] = task.kinds(batch)
    asked = batch["sources"] >= 0
    if not asked.any():
        return kinds
    kinds.pop("again", None)
    lags = {
        f"lag {name}": asked & (batch["buckets"] == number)
        for number, name in enumerate(task.bucket_names)
    }
    return {**lags, **kinds}


def _of_layer(
    seen: Look, by_level: tuple[Tensor, Tensor] | None, kinds: dict[str, Tensor]
) -> dict[str, Any]:
    shares = seen.read / seen.read.sum(-1, keepdim=True)
    found: dict[str, Any] = {
        name: {"count": int(member.sum()), "shares": shares[member].mean(0).tolist()}
        for name, member in kinds.items()
        if member.any()
    }
    constants = torch.where(seen.rates > 0, 1 / seen.rates, 0).tolist()
    layer = {"time_constants": [x or None for x in constants], "kinds": found}
    if by_level is None:
        return layer
    level, retrieved = by_level
    for name, kind in found.items():
        # The first token has nothing to retrieve.
        later = kinds[name][:, 1:]
        if later.any():
            kind["levels"] = retrieved[:, 1:][later].mean(0).tolist()
    return {**layer, "written": level.flatten(0, 1).mean(0).tolist()}


@torch.no_grad()
def by_order(
    model: Any,
    task: Any,
    config: Any,
    *,
    orders: Sequence[float] = ORDERS,
    bounds: Sequence[int] = BOUNDS,
    sequences: int = 32,
) -> dict[str, Any]:
    """Test accuracy by class of lag and by order of the source (figure overview, b).

    Args:
        model: trained, with one head and layer or more.
        task: as trained on; it must know the sources of its queries.
        config: of the training.
        orders: to impose on sources, all else left as learned.
        bounds: upper ends of all classes of lag but the last.
        sequences: how many of the test split.

    Returns:
        "lags": the classes, (low, high); "learned": for tenths of the range of orders that sources
        have of themselves (mean over heads, first layer), and "imposed": for each of `orders`,
        "order", then "accuracy" (None where there is no query) and "count" for each class of lag.
    """
    batch = task.batch("test", range(min(sequences, task.size("test") or sequences)))
    rows, queries = (batch["sources"] >= 0).nonzero(as_tuple=True)
    answers = batch["sources"][rows, queries].long()
    limits = [0, *(x for x in bounds if x < task.length), task.length - 1]
    classes = torch.bucketize(queries - answers, torch.tensor(limits[1:-1]))
    is_source = torch.zeros(batch["input_ids"].shape, dtype=torch.bool)
    is_source[rows, answers] = True

    def table(right: Tensor, member: Tensor) -> dict[str, Any]:
        where = [member & (classes == number) for number in range(len(limits) - 1)]
        scores = [right[x].float().mean().item() if x.any() else None for x in where]
        return {"accuracy": scores, "count": [int(x.sum()) for x in where]}

    every = torch.ones_like(answers, dtype=torch.bool)
    own = look(model, batch, config)[0].order.mean(-1)[rows, answers]
    right = _right(model, task, batch, config)[rows, queries]
    learned = []
    for number in range(CLASSES):
        member = (own * CLASSES).long().clamp(max=CLASSES - 1) == number
        if member.any():
            learned.append({"order": own[member].mean().item(), **table(right, member)})
    imposed = []
    for order in orders:
        with impose_order(model, order, is_source):
            found = _right(model, task, batch, config)[rows, queries]
        imposed.append({"order": order, **table(found, every)})
    lags = [[low + 1, high] for low, high in pairwise(limits)]
    return {"lags": lags, "learned": learned, "imposed": imposed}


@contextmanager
def impose_order(model: Any, order: float, where: Tensor) -> Iterator[None]:
    """While it lasts, tokens in `where` `[B, T]` have this order in all layers and heads."""

    def replace(projection: Any, given: Any, logits: Tensor) -> Tensor:
        low = floors[projection]
        share = torch.tensor((order - low) / (1 - low), dtype=torch.float64)
        # The ends of the range are at infinity, where the sigmoid is exact.
        return logits.masked_fill(where.to(logits.device)[..., None], torch.logit(share).item())

    routers = [block.self_attn.memory.router for block in model.model.layers]
    floors = {router.order: router.order_min for router in routers}
    hooks = [router.order.register_forward_hook(replace) for router in routers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _right(model: Any, task: Any, batch: Any, config: Any) -> Tensor:
    """`[B, T]`: whether the most likely class is the label."""
    device = next(model.parameters()).device
    model.eval()
    ids = batch["input_ids"].to(device)
    with precision_of(config):
        logits = model(ids, use_cache=False, **extras_of(model, batch, device)).logits
    best: Tensor = logits[..., : task.num_classes].argmax(-1).cpu() == batch["labels"]
    return best
