"""Small layers of every kind, and padded batches to try them on."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.memories.cases import NAMES
from vort.layers import LayerStates, VortAttention
from vort.memories import PAPER

HIDDEN, HEADS, WINDOW = 16, 2, 5
SIZES = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "sliding_window": WINDOW}
WAYS: dict[str, dict[str, Any]] = {
    "paper": {**PAPER, "num_banks": 3, "num_scales": 5, "num_features": 8, "horizon": 200},
    "plain": {
        "use_entropy": False,
        "conv_size": 0,
        "qk_norm": False,
        "output_norm": False,
        "write_gate": False,
        "read_weights": False,
        "output_gate": False,
        "feature_map": "identity",
        "normalizer": "none",
    },
    "undecayed": {
        "normalizer": "undecayed",
        "output_gate": True,
        "num_key_value_heads": 1,
        "use_entity": True,
        "include_self": False,
    },
    "learned": {"learn_basis": True, "order_input": "values", "order_start": [0.3, 0.7]},
    "free_writes": {"write_gain": "scale"},
    "no_window": {"sliding_window": 0, "feature_map": "elu"},
    "bounded_softmax": {"memory": "softmax", "softmax_cache_size": 7},
}
KINDS = (*NAMES, *WAYS)


def layer_of(kind: str) -> VortAttention:
    """A layer of a kind: a memory by name, or a way to use one."""
    torch.manual_seed(0)
    way = WAYS.get(kind, {"memory": kind})
    return VortAttention(**{**SIZES, "horizon": 1000, **way})


@st.composite
def masks(draw: st.DrawFn) -> Tensor:
    """A padding mask: left, right, scattered, whole rows of padding; at least one token."""
    batch, length = draw(st.integers(1, 3)), draw(st.integers(1, 40))
    kind = draw(st.sampled_from(["left", "right", "scattered"]))
    mask = torch.zeros(batch, length, dtype=torch.bool)
    for row in range(batch):
        count = draw(st.integers(0, length))
        if kind == "left":
            mask[row, length - count :] = True
        elif kind == "right":
            mask[row, :count] = True
        else:
            seed = draw(st.integers(0, 99))
            order = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
            mask[row, order[:count]] = True
    mask[0, 0] |= not mask.any()
    return mask


def unpadded(layer: VortAttention, x: Tensor, mask: Tensor) -> Tensor:
    """What the layer says to each row by itself, its padding taken out; zeros at padding."""
    expected = torch.zeros_like(x)
    for row in range(len(x)):
        if mask[row].any():
            expected[row, mask[row]] = layer(x[row, mask[row]].unsqueeze(0))[0][0]
    return expected


def in_pieces(
    layer: VortAttention, x: Tensor, cuts: list[int], mask: Tensor | None = None
) -> Tensor:
    """The layer's output when the sequence comes in pieces that end at `cuts`."""
    states, outputs, start = LayerStates(), [], 0
    for stop in [*cuts, x.shape[1]]:
        if stop > start:
            seen = None if mask is None else mask[:, :stop]
            piece = x[:, start:stop]
            outputs.append(layer(piece, seen, past_key_values=states, use_cache=True)[0])
            start = stop
    return torch.cat(outputs, 1)
