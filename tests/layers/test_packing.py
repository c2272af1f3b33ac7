"""Packed sequences under the names that callers of attention layers send, and what is refused."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from tests.layers.cases import HIDDEN, layer_of
from vort.layers import LayerStates

LENGTHS = [7, 1, 12]
TOTAL = sum(LENGTHS)
BOUNDS = torch.tensor([0, *LENGTHS]).cumsum(0)
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
NUMBERS = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))[None]
NAMES: dict[str, dict[str, Any]] = {
    "position_ids": {"position_ids": POSITIONS},
    "counted from 2": {"position_ids": POSITIONS + 2},
    "one row for all": {"position_ids": POSITIONS[0]},
    "seq_idx": {"seq_idx": NUMBERS.int()},
    "flash": {
        "cu_seq_lens_q": BOUNDS.int(),
        "cu_seq_lens_k": BOUNDS.int(),
        "max_length_q": 12,
        "max_length_k": 12,
    },
    "all of them": {"cu_seqlens": BOUNDS, "position_ids": POSITIONS, "seq_idx": NUMBERS},
}
CLOSE = {"atol": 2e-5, "rtol": 1e-4}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["vort", "softmax", "gla", "no_window"])
@torch.no_grad()
def test_every_name_resets_memory_window_and_convolution(kind: str, name: str) -> None:
    layer, x = layer_of(kind).eval(), torch.randn(1, TOTAL, HIDDEN)
    expected = torch.cat([layer(part)[0] for part in x.split(LENGTHS, 1)], 1)
    torch.testing.assert_close(layer(x, **NAMES[name])[0], expected, **CLOSE)
    states = LayerStates()
    kept, _, order = layer(
        x, past_key_values=states, use_cache=True, output_orders=True, **NAMES[name]
    )
    torch.testing.assert_close(kept, expected, **CLOSE)
    assert order is None or order.shape[:2] == x.shape[:2]


@torch.no_grad()
def test_several_rows_may_be_packed_and_padded() -> None:
    layer, x = layer_of("vort").eval(), torch.randn(2, 12, HIDDEN)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3], [0, 1, 2, *range(7), 0, 0]])
    mask = torch.ones(2, 12)
    mask[1, 10:] = 0
    output, _ = layer(x, mask, position_ids=positions)
    for row, start, stop in ((0, 0, 8), (0, 8, 12), (1, 0, 3), (1, 3, 10)):
        alone = layer(x[row : row + 1, start:stop])[0][0]
        torch.testing.assert_close(output[row, start:stop], alone, **CLOSE)
    assert not output[1, 10:].any()


@torch.no_grad()
def test_what_counts_up_changes_nothing() -> None:
    layer, x = layer_of("vort").eval(), torch.randn(2, 9, HIDDEN)
    mask = torch.ones(2, 9)
    mask[1, :4] = 0
    expected = layer(x, mask)[0]
    left = (mask.cumsum(1) - 1).clamp(min=0).long()
    packed, bounds = x[:1], torch.tensor([0, 4, 9])
    straight = layer(packed, cu_seqlens=bounds, position_ids=torch.arange(9)[None])[0]
    assert torch.equal(straight, layer(packed, cu_seqlens=bounds)[0])
    for positions in (torch.arange(9)[None], torch.arange(5, 14).expand(2, 9), left, left + 1):
        assert torch.equal(layer(x, mask, position_ids=positions)[0], expected)
    others = {"position_embeddings": None, "cache_position": torch.arange(9), "is_causal": True}
    assert torch.equal(layer(x, mask, output_attentions=False, **others)[0], expected)


@torch.no_grad()
def test_sequences_with_bounds_may_count_from_anywhere() -> None:
    layer, x = layer_of("vort").eval(), torch.randn(1, 9, HIDDEN)
    bounds = torch.tensor([0, 4, 9])
    expected = layer(x, cu_seqlens=bounds)[0]
    pieces = torch.tensor([[7, 8, 9, 10, 0, 1, 2, 3, 4]])  # the first is the end of a longer one
    padded = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 0]])
    for positions in (pieces, padded):
        assert torch.equal(layer(x, cu_seqlens=bounds, position_ids=positions)[0], expected)
    states = LayerStates()
    layer(x, cu_seqlens=bounds, past_key_values=states, use_cache=True)
    more = {"cu_seqlens": torch.tensor([0, 3, 5]), "past_key_values": states}
    going_on = torch.tensor([[4, 5, 6, 5, 6]])
    found = layer(x[:, :5], position_ids=going_on, **more)[0]
    assert torch.equal(found, layer(x[:, :5], **more)[0])


BAD: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    ({"attenton_mask": torch.ones(1, 6)}, TypeError, "did you mean attention_mask"),
    ({"output_attentions": True}, ValueError, "output_attentions must be off"),
    ({"is_causal": False}, ValueError, "is_causal must be True"),
    ({"position_ids": torch.tensor([[0, 1, 2, 5, 6, 7]])}, ValueError, "2 then 5 at position 3"),
    ({"position_ids": torch.arange(5)[None]}, ValueError, r"position_ids must be \[1, 6\]"),
    ({"position_ids": torch.arange(6.0)[None]}, TypeError, "position_ids must hold integers"),
    ({"cu_seqlens": torch.tensor([0.0, 6.0])}, TypeError, "cu_seqlens must hold integers"),
    ({"cu_seqlens": torch.tensor([0, 4])}, ValueError, "end at T=6"),
    ({"cu_seqlens": torch.tensor([0, 5, 3, 6])}, ValueError, "must not decrease"),
    (
        {"cu_seqlens": torch.tensor([0, 6]), "cu_seq_lens_q": torch.tensor([0, 2, 6])},
        ValueError,
        "must be the same bounds",
    ),
    ({"cu_seqlens": [0, 6]}, TypeError, "cu_seqlens must"),
    (
        {"cu_seqlens": torch.tensor([0, 6]), "position_ids": torch.tensor([[0, 1, 0, 1, 2, 3]])},
        ValueError,
        r"a beginning at 2 and cu_seqlens \[0, 6\]",
    ),
    (
        {"cu_seqlens": torch.tensor([0, 3, 6]), "seq_idx": torch.tensor([[0, 0, 1, 1, 1, 1]])},
        ValueError,
        "must begin anew where cu_seqlens do, or nowhere",
    ),
    ({"past_key_values": DynamicCache()}, TypeError, "must be LayerStates.*got DynamicCache"),
)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(("given", "error", "words"), BAD, ids=[words for *_, words in BAD])
def test_anything_else_is_refused_in_words(
    given: dict[str, Any], error: type[Exception], words: str, kept: bool
) -> None:
    layer, x = layer_of("no_window").eval(), torch.randn(1, 6, HIDDEN)
    states = {"past_key_values": LayerStates(), "use_cache": True} if kept else {}
    with pytest.raises(error, match=words):
        layer(x, **{**states, **given})


def test_packed_rows_are_one_row_and_start_afresh() -> None:
    layer, x = layer_of("vort").eval(), torch.randn(2, TOTAL, HIDDEN)
    for states in ({}, {"past_key_values": LayerStates(), "use_cache": True}):
        with pytest.raises(ValueError, match="batch size 1, got 2"):
            layer(x, cu_seqlens=BOUNDS, **states)
    states = LayerStates()
    layer(x, past_key_values=states, use_cache=True)
    with pytest.raises(ValueError, match="past_key_values must be empty"):
        layer(x, past_key_values=states, use_cache=True, position_ids=POSITIONS)
