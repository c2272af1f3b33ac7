"""Small memories of every kind, and what to give them."""

import torch

from vort.memories import MEMORIES, Memory, MemoryInputs

# Those that decode; the others score whole sequences.
NAMES = tuple(name for name, kind in MEMORIES.items() if kind.keeps_state)
SIZES = {"hidden_size": 16, "num_attention_heads": 2, "horizon": 1000}


def made(name: str, **changes: object) -> Memory:
    """The memory of a name, with the same weights every time."""
    torch.manual_seed(0)
    return MEMORIES[name](**{**SIZES, **changes})


def inputs(length: int = 12, kv_heads: int = 2, seed: int = 1) -> MemoryInputs:
    """Random tokens for two heads of size 8, two rows."""
    torch.manual_seed(seed)
    q, k = torch.randn(2, length, 2, 8), torch.randn(2, length, kv_heads, 8)
    v = torch.randn(2, length, kv_heads, 8)
    return MemoryInputs(torch.randn(2, length, 16), q, k, v, torch.rand(2, length, 2))
