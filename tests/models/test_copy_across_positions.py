"""A two-layer model learns to copy across 2,000 positions, and cannot without a memory."""

import pytest
import torch
from torch import Tensor

from vort.models import VortConfig, VortForCausalLM

PAIRS, VALUES, FAR = 4, 8, 2000


def batch(size: int, gap: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Key-value pairs, `gap` blanks, the same pairs again; the values are to be copied."""
    values = torch.randint(VALUES, (size, PAIRS), generator=generator) + 1 + PAIRS
    keys = torch.arange(1, PAIRS + 1).expand(size, PAIRS)
    pairs = torch.stack([keys, values], -1).flatten(1)
    blanks = torch.zeros(size, gap, dtype=torch.long)
    return torch.cat([pairs, blanks, pairs], 1), values


def scores(model: VortForCausalLM, ids: Tensor) -> Tensor:
    """Logits where a key has been seen again and its value is next, `[B, PAIRS, vocab]`."""
    logits: Tensor = model(ids, logits_to_keep=2 * PAIRS).logits
    return logits[:, 0::2]


def accuracy_after_training(memory: str, steps: int, far_steps: int) -> float:
    """How many of 256 values are copied across 2,000 blanks."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    config = VortConfig(
        vocab_size=1 + PAIRS + VALUES,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        sliding_window=16,
        memory=memory,
        horizon=4096,
        num_scales=6,
        num_features=32,
        initializer_range=0.1,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = VortForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0)
    total = steps + far_steps
    for step in range(total):
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * min(1, (step + 1) / 20, (total - step) / (0.3 * total))
        # Short gaps first: the mechanism is the same, and a step costs a tenth.
        ids, values = batch(8, 100 if step < steps else FAR, generator)
        loss = torch.nn.functional.cross_entropy(scores(model, ids).flatten(0, 1), values.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    ids, values = batch(64, FAR, generator)
    with torch.no_grad():
        return (scores(model, ids).argmax(-1) == values).float().mean().item()


@pytest.mark.slow
def test_vort_learns_to_copy_and_no_memory_does_not() -> None:
    with_memory = accuracy_after_training("vort", steps=220, far_steps=30)
    without = accuracy_after_training("none", steps=220, far_steps=30)
    assert with_memory > 0.95
    assert without < 0.3  # chance is 1 in 8
