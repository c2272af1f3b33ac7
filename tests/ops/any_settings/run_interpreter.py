"""Blocks of settings drawn at random, called in ways drawn at random: kernels against PyTorch.

`python -m tests.ops.any_settings.run_interpreter FIRST LAST` under TRITON_INTERPRET=1 draws by
hand. What a setting does alone others test; here they meet.
"""

import random
import sys
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.ops.interpreter import kernels_everywhere, poison_memory

# Gradients that are sums of what cancels have no digits of their own.
RELATIVE, ABSOLUTE = 2e-4, 3e-5
# A value more than once is drawn more often.
CHOICES: dict[str, tuple[Any, ...]] = {
    "head_dim": (6, 8, 8, 16),
    "sliding_window": (0, 1, 3, 3, 40),
    "rope_theta": (None, 1e4, 1e4, 1e4),
    "memory": (
        *["vort"] * 8, "exponential", "mixture", "uniform_power_law", "softmax", "gla", "linear",
        "gla_scales", "mamba2", "gated_delta", "none",
    ),
    "num_scales": (1, 2, 2, 2, 4),
    "feature_map": (*["hedgehog"] * 4, "favor", "elu", "relu"),
    "normalizer": ("decayed", "decayed", "undecayed", "none"),
    "include_self": (True, True, False),
    "use_entropy": (True, False),
    "use_entity": (True, False, False),
    "write_gate": (True, False),
    "write_gain": ("none", "none", "token", "scale"),
    "read_weights": (True, True, False),
    "conv_size": (0, 2, 4, 4, 5),
    "qk_norm": (True, False),
    "output_norm": (True, False),
    "output_gate": (True, False),
    "attention_bias": (False, False, False, True),
    "order_input": ("hidden", "hidden", "hidden", "values"),
    "learn_basis": (False, False, False, True),
    "leak": (False, False, True),
    "routing": (*["continuous"] * 4, "banks"),
}  # fmt: skip
CALLS = ("plain", "plain", "packed", "packed", "padded", "entities")
# How a block goes on from a state, where it can.
LATER = (None, "pieces", "steps", "steps in place")


def drawn(seed: int) -> tuple[dict[str, Any], str, str | None]:
    """Settings of a block, a way to call it, and one to go on."""
    source = random.Random(seed)
    found = {name: source.choice(values) for name, values in CHOICES.items()}
    heads = source.choice((1, 2, 2, 4))
    found |= {"hidden_size": 32, "num_attention_heads": heads, "horizon": 100, "num_banks": 2}
    found["num_key_value_heads"] = source.choice((heads, heads, 1))
    if found["routing"] == "banks":
        found |= {"learn_basis": False, "leak": False}
    if found["memory"] == "gla_scales":  # it knows no other
        found |= {"include_self": True, "normalizer": "decayed"}
    if found["feature_map"] in ("hedgehog", "favor"):
        found["num_features"] = source.choice((None, 4))
    return found, source.choice(CALLS), source.choice(LATER)


def results(seed: int, kernels: bool) -> dict[str, Tensor]:
    """Outputs, gradients and states by name."""
    from vort.layers import LayerStates
    from vort.models import VortConfig
    from vort.models.block import VortBlock

    settings, call, later = drawn(seed)
    with kernels_everywhere(kernels):
        torch.manual_seed(seed)
        block = VortBlock(VortConfig(**settings, intermediate_size=24, match_parameters=False), 0)
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape))
        rows, length = 1 if call == "packed" else 2, (7, 11, 35)[seed % 3]
        x = torch.randn(rows, length, 32, requires_grad=True)
        given: dict[str, Tensor] = {}
        if call == "packed":
            given["cu_seqlens"] = torch.tensor([0, 3, 3, length])
        if call == "padded":
            mask = given["attention_mask"] = torch.ones(rows, length, dtype=torch.long)
            mask[0, :2] = mask[1, -3:] = 0
        if settings["use_entity"] or call == "entities":
            given["entity_mask"] = (torch.rand(rows, length) < 0.3).long()
        y, order = block(x, output_orders=True, **given)
        named = {"x": x} | dict(block.named_parameters())
        back = torch.randn(y.shape)
        grads = torch.autograd.grad(y, list(named.values()), back, allow_unused=True)
        found = {"y": y.detach()} | ({} if order is None else {"order": order.detach()})
        for name, grad in zip(named, grads, strict=True):
            found[f"d{name}"] = torch.zeros_like(named[name]) if grad is None else grad
        if later is None or call == "packed" or not block.self_attn.memory.keeps_state:
            return found
        block.eval()
        states, parts, cut = LayerStates(static=later == "steps in place"), [], length // 2
        step = 5 if later == "pieces" else 1
        bounds = [0, *range(cut, min(length, cut + 6) + 1, step)]
        with torch.no_grad():
            for start, end in pairwise(bounds):
                now = {name: mark[:, start:end] for name, mark in given.items()}
                if states.in_place:
                    now.pop("attention_mask", None)
                options = {"past_key_values": states, "use_cache": True, **now}
                parts.append(block(x[:, start:end], **options)[0])
                states.in_place = later == "steps in place"
        found["later"] = torch.cat(parts, 1)
        return found | {f"state {name}": s.float() for name, s in states.states[0].items()}


def check(seed: int) -> None:
    wanted, got = results(seed, False), results(seed, True)
    assert got.keys() == wanted.keys(), drawn(seed)
    for name, x in wanted.items():
        error, size = (got[name] - x).double().norm(), x.double().norm()
        assert error <= RELATIVE * size + ABSOLUTE, (seed, name, error, size, drawn(seed))


if __name__ == "__main__":
    poison_memory()
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        check(number)
