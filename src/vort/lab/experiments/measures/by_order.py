"""Accuracy by lag and by the order of the token that holds the answer, learned or imposed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from vort.lab.experiments.measures.look import extras_of, look
from vort.lab.experiments.measures.precision import precision_of

__all__ = ["by_order", "impose_order"]

BOUNDS = (3, 10, 30, 100, 300)
ORDERS = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
CLASSES = 10


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
        logits = model(ids, use_cache=False, **extras_of(batch, device)).logits
    best: Tensor = logits[..., : task.num_classes].argmax(-1).cpu() == batch["labels"]
    return best
