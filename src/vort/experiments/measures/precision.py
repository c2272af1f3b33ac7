"""The number format that a model was trained in."""

from contextlib import nullcontext
from typing import Any

import torch

__all__ = ["precision_of"]


def precision_of(config: Any) -> Any:
    """The autocast that a model was trained under, for scoring it outside the training loop."""
    half = config.precision == "bf16" or (
        config.precision == "auto"
        and torch.cuda.is_available()
        and torch.cuda.is_bf16_supported(including_emulation=False)
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.autocast(device, torch.bfloat16) if half else nullcontext()
