"""The parts of a layer: padding, the short convolution, local attention with a state."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layers.cases import masks
from vort.layers import LayerStates, ShortConvolution
from vort.ops.local_attention.local import attend_locally
from vort.ops.padding import Padding, keep_last, pad_packed


@given(mask=masks())
@settings(max_examples=30)
def test_aligning_brings_tokens_to_the_front_in_their_order(mask: torch.Tensor) -> None:
    padding = Padding.of(mask, *mask.shape)
    if padding is None:
        assert mask.all()
        return
    numbers = torch.arange(mask.numel()).view(*mask.shape, 1) + 1
    aligned = padding.align(numbers)
    for row in range(len(mask)):
        tokens = numbers[row][mask[row]]
        assert torch.equal(aligned[row, : len(tokens)], tokens)
        assert (aligned[row, len(tokens) :] == 0).all()
    assert torch.equal(padding.restore(aligned), numbers * mask[..., None])
    assert torch.equal(padding.unpack(padding.pack(aligned)), aligned)


def test_a_mask_of_ones_is_no_padding() -> None:
    assert Padding.of(torch.ones(2, 9), 2, 4) is None
    assert Padding.of(None, 2, 4) is None


def test_packed_rows_come_apart() -> None:
    rows, mask = pad_packed(torch.arange(6).view(1, 6, 1), torch.tensor([0, 1, 1, 6]))
    assert rows.shape == (3, 5, 1)
    assert mask.sum(1).tolist() == [1, 0, 5]


def test_keep_last_follows_each_rows_length() -> None:
    past, new = torch.tensor([[1, 2, 3], [1, 2, 3]]), torch.tensor([[4, 5], [4, 5]])
    assert keep_last(past, new, torch.tensor([1, 2])).tolist() == [[2, 3, 4], [3, 4, 5]]
    assert keep_last(past, new, None).tolist() == [[3, 4, 5], [3, 4, 5]]


def test_short_convolution_is_pytorchs() -> None:
    convolution = ShortConvolution(channels=6, size=4)
    x = torch.randn(2, 11, 6)
    padded = torch.nn.functional.pad(x.mT, (3, 0))
    kernel = convolution.weight.flip(1).unsqueeze(1)
    expected = torch.nn.functional.silu(torch.conv1d(padded, kernel, groups=6)).mT
    torch.testing.assert_close(convolution(x)[0], expected)


@given(split=st.integers(0, 9))
@settings(max_examples=10)
def test_short_convolution_goes_on_where_it_stopped(split: int) -> None:
    convolution, x = ShortConvolution(channels=3, size=4), torch.randn(2, 9, 3)
    first, state = convolution(x[:, :split], output_state=True)
    second, _ = convolution(x[:, split:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), convolution(x)[0])


@given(cuts=st.lists(st.integers(0, 30), max_size=5), window=st.integers(1, 12))
@settings(max_examples=20)
def test_local_attention_goes_on_where_it_stopped(cuts: list[int], window: int) -> None:
    q, k, v = torch.randn(3, 2, 30, 2, 4)
    options = {"rope_base": 100.0, "return_entropy": True}
    whole, entropy, _ = attend_locally(q, k, v, window, **options)
    state, outputs, entropies, start = None, [], [], 0
    for stop in [*sorted(cuts), 30]:
        if stop == start:
            continue
        part = [x[:, start:stop] for x in (q, k, v)]
        o, h, state = attend_locally(*part, window, state=state, output_state=True, **options)
        outputs.append(o)
        entropies.append(h)
        start = stop
    torch.testing.assert_close(torch.cat(outputs, 1), whole, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(torch.cat(entropies, 1), entropy, atol=1e-4, rtol=1e-4)


def test_layer_states_can_be_selected_and_detached() -> None:
    states = LayerStates()
    states.store_state(3, {"G": torch.randn(2, 4, requires_grad=True)}, positions=1)
    picked = states.select(torch.tensor([1, 1, 0]))
    assert picked.load_state(3)["G"].shape == (3, 4)
    assert states.load_state(3)["G"].shape == (2, 4)
    assert not states.detach().load_state(3)["G"].requires_grad
    assert states.load_state(0) is None


def test_a_convolution_of_one_position_is_refused() -> None:
    with pytest.raises(ValueError, match="size must be at least 2 positions, got 1"):
        ShortConvolution(4, 1)
