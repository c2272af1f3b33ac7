"""The number format that a model was trained in."""

from contextlib import nullcontext
from typing import Any

import torch

from vort.lab.training.setup import uses_bf16

__all__ = ["precision_of"]


def precision_of(config: Any) -> Any:
    """The autocast that a model was trained under, for scoring it outside the training loop."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.autocast(device, torch.bfloat16) if uses_bf16(config) else nullcontext()
