"""Small models, quick to build."""

from typing import Any

import torch

from vort.models import VortConfig, VortForCausalLM

WINDOW = 6


def config_of(memory: str = "vort", **changes: Any) -> VortConfig:
    """Two layers of width 32; "paper" is the paper's configuration at that size."""
    sizes = {
        "vocab_size": 40,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "sliding_window": WINDOW,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.2,  # logits far enough apart that rounding decides nothing
    }
    if memory == "paper":
        return VortConfig.paper(**{**sizes, "num_banks": 3, "num_scales": 5, **changes})
    return VortConfig(**{**sizes, "memory": memory, "horizon": 1000, **changes})


def model_of(memory: str = "vort", **changes: Any) -> VortForCausalLM:
    """The model of `config_of`, with the same weights every time."""
    torch.manual_seed(0)
    return VortForCausalLM(config_of(memory, **changes)).eval()


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random tokens `[B, T]`, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 40, (batch, length), generator=generator)
