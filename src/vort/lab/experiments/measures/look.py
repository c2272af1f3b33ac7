"""What the memories of a trained model do with test sequences: orders, gates, read weights."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vort.lab.experiments.measures.precision import precision_of
from vort.plasticity import record_memories

__all__ = ["Look", "extras_of", "look"]


class Look(NamedTuple):
    """The routing of one layer on a batch, on the CPU.

    Attributes:
        order: `[B, T, H]`.
        gate: `[B, T, H]`, share of a token that is written; ones where there is no gate.
        read: `[B, T, H, S]`, weights over time scales that average 1; ones where there are none.
        rates: `[S]`, what each time scale forgets in a step.
    """

    order: Tensor
    gate: Tensor
    read: Tensor
    rates: Tensor


@torch.no_grad()
def look(model: Any, batch: Any, config: Any) -> list[Look]:
    """Every layer's routing of a batch; the model's memories must be `VortMemory`."""
    device = next(model.parameters()).device
    model.eval()
    ids = batch["input_ids"].to(device)
    with precision_of(config), record_memories(model) as found:
        model.model(ids, use_cache=False, **extras_of(batch, device))
    return [_look(memory, inputs) for memory, inputs in found]


def extras_of(batch: Any, device: torch.device) -> dict[str, Tensor]:
    """What else a model is told of a batch: who is an entity, where the task knows."""
    return {"entity_mask": batch["entity_mask"].to(device)} if "entity_mask" in batch else {}


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
