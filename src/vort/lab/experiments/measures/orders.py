"""How learned orders are distributed over kinds of tokens."""

from typing import Any

import torch
from torch import Tensor

from vort.lab.experiments.measures.kinds import kinds_of
from vort.lab.experiments.measures.precision import precision_of

__all__ = ["orders_by_kind"]

BINS = 40


@torch.no_grad()
def orders_by_kind(model: Any, task: Any, config: Any) -> dict[str, Any]:
    """How orders are distributed over kinds of tokens: mean, spread and histogram on [0, 1].

    Kinds are those of `kinds_of`.
    """
    device = next(model.parameters()).device
    model.eval()
    batch = task.batch("test", range(min(4, task.size("test") or 4)))
    extras = {"entity_mask": batch["entity_mask"].to(device)} if "entity_mask" in batch else {}
    ids = batch["input_ids"].to(device)
    with precision_of(config):
        layers = model.model(ids, use_cache=False, output_orders=True, **extras).orders
    kinds = kinds_of(task, batch)
    return {
        "bins": BINS,
        "layers": [
            {name: _distribution(order.float().cpu()[member]) for name, member in kinds.items()}
            for order in layers
            if order is not None
        ],
    }


def _distribution(orders: Tensor) -> dict[str, Any]:
    if not orders.numel():
        return {"count": 0}
    histogram = torch.histc(orders, BINS, 0.0, 1.0)
    return {
        "count": int(orders.shape[0]),
        "mean": orders.mean().item(),
        "deviation": orders.std(correction=0).item(),
        "heads": orders.mean(0).tolist(),
        "histogram": (histogram / histogram.sum()).tolist(),
    }
