"""AdamW with decay where it belongs, and the learning rate of each step."""

from math import cos, pi

import torch
from torch import nn

from vort.lab.training.config import TrainingConfig

__all__ = ["decays", "learning_rate_at", "make_optimizer"]

_MATRICES = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d)


def decays(model: nn.Module) -> dict[str, bool]:
    """For each parameter: whether weight decay may shrink it.

    Matrices that mix features decay. Norms, biases, rates, orders, feature maps and all that routes
    or gates do not: there, zero is one setting among others and not a simpler one. The `gate_proj`
    of a gated MLP is a matrix like any other.
    """
    modules = dict(model.named_modules())
    found = {}
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        routes = any(
            part == "router" or (part.startswith("gate") and part != "gate_proj")
            for part in path.split(".")
        )
        matrix = isinstance(modules[path], _MATRICES) and leaf == "weight" and parameter.ndim > 1
        found[name] = matrix and not routes
    return found


def make_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW over all parameters that learn, in a group that decays and one that does not."""
    may_decay = decays(model)
    learning = [(name, x) for name, x in model.named_parameters() if x.requires_grad]
    if not learning:
        raise ValueError("model must have parameters that require a gradient, got none")
    groups = [
        {
            "params": [x for name, x in learning if may_decay[name] == decay],
            "weight_decay": config.weight_decay if decay else 0.0,
        }
        for decay in (True, False)
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        fused=learning[0][1].is_cuda,
    )


def learning_rate_at(step: int, total: int, config: TrainingConfig) -> float:
    """Linear warm-up, then half a cosine down to the final fraction, reached at the last step.

    >>> config = TrainingConfig(steps=100, learning_rate=1.0, warmup=0.1, final_fraction=0.1)
    >>> [round(learning_rate_at(step, 100, config), 2) for step in (0, 9, 10, 99)]
    [0.1, 1.0, 1.0, 0.1]
    """
    warm = round(config.warmup * total)
    if step < warm:
        return config.learning_rate * (step + 1) / warm
    share = (step - warm) / max(total - 1 - warm, 1)
    low = config.final_fraction
    return config.learning_rate * (low + (1 - low) * 0.5 * (1 + cos(pi * share)))
