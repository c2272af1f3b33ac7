"""Small layers of every kind, and padded batches to try them on."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from vort.layers import LayerStates, VortAttention
from vort.memories import MEMORIES, MemorySettings, build_memory

HIDDEN, HEADS, WINDOW = 16, 2, 5
KINDS = (*MEMORIES, "paper", "plain", "undecayed", "no_window", "bounded_softmax")


def layer_of(kind: str) -> VortAttention:
    """A layer of a kind: a memory by name, or a way to use VORT's."""
    torch.manual_seed(0)
    if kind == "paper":
        return VortAttention.paper(
            HIDDEN, HEADS, banks=3, terms=5, num_features=8, horizon=200, window=WINDOW
        )
    if kind == "plain":
        return VortAttention(
            HIDDEN,
            HEADS,
            window=WINDOW,
            horizon=1000,
            conv_size=0,
            qk_norm=False,
            output_norm=False,
            write_gate=False,
            read_weights=False,
            features="identity",
            normalizer="none",
        )
    if kind == "undecayed":
        return VortAttention(
            HIDDEN,
            HEADS,
            window=WINDOW,
            horizon=1000,
            normalizer="undecayed",
            features="hedgehog",
            output_gate=True,
            num_key_value_heads=1,
            use_entropy=True,
            use_entity=True,
            include_self=False,
        )
    if kind == "no_window":
        return VortAttention(HIDDEN, HEADS, window=0, horizon=1000, features="elu")
    settings = MemorySettings(
        hidden_size=HIDDEN,
        num_heads=HEADS,
        head_dim=HIDDEN // HEADS,
        horizon=1000,
        use_entropy=True,
        cache_size=7 if kind == "bounded_softmax" else None,
    )
    name = "softmax" if kind == "bounded_softmax" else kind
    return VortAttention(HIDDEN, HEADS, window=WINDOW, memory=build_memory(name, settings))


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
