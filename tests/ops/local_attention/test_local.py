"""Attention that goes on from a state gives what the whole sequence gives."""

from typing import Any

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vort.ops.local_attention import LocalState, attend_locally, local_attention

from .cases import make


def go_on(
    tensors: list[Tensor], window: int, state: LocalState | None, **options: Any
) -> tuple[Tensor, Tensor, LocalState]:
    o, entropy, after = attend_locally(
        *tensors, window, state=state, return_entropy=True, output_state=True, **options
    )
    assert entropy is not None
    assert after is not None
    return o, entropy, after


def decode(
    tensors: list[Tensor], window: int, state: LocalState, **options: Any
) -> tuple[Tensor, Tensor, LocalState]:
    outputs, entropies = [], []
    for t in range(tensors[0].shape[1]):
        one = [x[:, t : t + 1] for x in tensors]
        o, entropy, state = go_on(one, window, state, **options)
        outputs.append(o)
        entropies.append(entropy)
    return torch.cat(outputs, 1), torch.cat(entropies, 1), state


@pytest.mark.parametrize("window", [1, 5, 16, 100])
@pytest.mark.parametrize("rope_base", [None, 1e4])
def test_steps_equal_the_whole_in_float32(window: int, rope_base: float | None) -> None:
    case = make(2, 60, 4, 2, dim=8, value_dim=6, window=window, dtype=torch.float32)
    tensors = [case.q, case.k, case.v]
    wanted, wanted_entropy = local_attention(
        *tensors, window, rope_base=rope_base, return_entropy=True
    )
    state = LocalState.empty(case.k, case.v, window)
    o, entropy, state = decode(tensors, window, state, rope_base=rope_base)
    torch.testing.assert_close(o, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy, wanted_entropy, rtol=1e-6, atol=2e-6)
    assert state.seen.tolist() == [60, 60]


@settings(max_examples=40)
@given(
    pieces=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=4),
    steps=st.integers(0, 6),
    window=st.integers(1, 40),
    rope=st.booleans(),
    scale=st.sampled_from([None, 0.3]),
)
def test_pieces_and_steps_of_rows_that_differ_equal_each_row_alone(
    pieces: list[tuple[int, int]], steps: int, window: int, rope: bool, scale: float | None
) -> None:
    """A piece has so many real positions in each of two rows, then NaN; so does a step."""
    pieces = pieces + [(1, step % 2) for step in range(steps)]
    totals = [sum(row) for row in zip(*pieces, strict=True)]
    case = make(2, max(totals), 2, 1, window=window)
    tensors = [case.q, case.k, case.v]
    options = {"rope_base": 1e4 if rope else None, "scale": scale}
    found: list[list[Tensor]] = [[], []]
    entropies: list[list[Tensor]] = [[], []]
    state, at = None, [0, 0]
    for piece in pieces:
        lengths = torch.tensor(piece)
        real = torch.arange(max(piece)) < lengths[:, None]
        given_ = [x.new_full((2, max(piece), *x.shape[2:]), torch.nan) for x in tensors]
        for row in range(2):
            for x, source in zip(given_, tensors, strict=True):
                x[row, : piece[row]] = source[row, at[row] : at[row] + piece[row]]
        o, entropy, state = go_on(given_, window, state, real=real, lengths=lengths, **options)
        assert not o[~real].any()
        assert not entropy[~real].any()
        for row in range(2):
            found[row].append(o[row, : piece[row]])
            entropies[row].append(entropy[row, : piece[row]])
            at[row] += piece[row]
    assert state is not None
    assert state.seen.tolist() == totals
    for row, total in enumerate(totals):
        alone = [x[row : row + 1, :total] for x in tensors]
        wanted, wanted_entropy = local_attention(*alone, window, return_entropy=True, **options)
        assert wanted_entropy is not None
        torch.testing.assert_close(torch.cat(found[row]), wanted[0], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(
            torch.cat(entropies[row]), wanted_entropy[0], rtol=1e-10, atol=1e-10
        )


@pytest.mark.parametrize("length", [0, 1, 3, 8, 9, 29])
def test_a_prompt_leaves_the_state_that_steps_leave(length: int) -> None:
    case = make(1, length, window=8)
    tensors = [case.q, case.k, case.v]
    _, _, filled = go_on(tensors, 8, None, rope_base=1e4)
    stepped = LocalState.empty(case.k, case.v, 8)
    for t in range(length):
        _, _, stepped = go_on([x[:, t : t + 1] for x in tensors], 8, stepped, rope_base=1e4)
    for got, wanted in zip(filled, stepped, strict=True):
        torch.testing.assert_close(got, wanted)


def test_a_position_lives_in_its_slot_of_the_ring() -> None:
    case = make(2, 9, window=4)
    lengths = torch.tensor([9, 6])
    real = torch.arange(9) < lengths[:, None]
    _, _, state = go_on([case.q, case.k, case.v], 4, None, real=real, lengths=lengths)
    for row, length in enumerate(lengths.tolist()):
        for position in range(length - 4, length):
            assert torch.equal(state.k[row, position % 4], case.k[row, position])
            assert torch.equal(state.v[row, position % 4], case.v[row, position])


def test_memory_of_the_state_is_constant() -> None:
    case = make(1, 50, window=6)
    state = LocalState.empty(case.k, case.v, 6)
    shapes = [x.shape for x in state]
    _, _, state = decode([case.q, case.k, case.v], 6, state)
    assert [x.shape for x in state] == shapes


def test_going_on_leaves_the_given_state_alone() -> None:
    case = make(1, 20, window=6)
    tensors = [case.q, case.k, case.v]
    _, _, state = go_on(tensors, 6, None)
    kept = [x.clone() for x in state]
    for length in (1, 7):
        go_on([x[:, :length] for x in tensors], 6, state)
        for got, wanted in zip(state, kept, strict=True):
            assert torch.equal(got, wanted)


def test_gradients_flow_through_the_state() -> None:
    case = make(1, 12, window=5)
    whole, pieces = case.leaves(), case.leaves()
    wanted, _ = local_attention(*whole, 5)
    first, _, state = go_on([x[:, :4] for x in pieces], 5, None)
    second, _, state = go_on([x[:, 4:7] for x in pieces], 5, state)
    third, _, _ = decode([x[:, 7:] for x in pieces], 5, state)
    got = torch.cat([first, second, third], 1)
    for mine, theirs in zip(
        torch.autograd.grad(got.square().sum(), pieces),
        torch.autograd.grad(wanted.square().sum(), whole),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_one_compiled_step_serves_every_position() -> None:
    torch.compiler.reset()
    case = make(1, 14, window=4, dtype=torch.float32)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = torch.compile(attend_locally, backend=counter, fullgraph=True)
    compiled = plain = LocalState.empty(case.k, case.v, 4)
    for t in range(14):
        inputs = [x[:, t : t + 1] for x in (case.q, case.k, case.v)]
        options = {"rope_base": 1e4, "output_state": True}
        got, _, compiled = step(*inputs, 4, state=compiled, **options)
        wanted, _, plain = attend_locally(*inputs, 4, state=plain, **options)
        torch.testing.assert_close(got, wanted)
    assert counter.frame_count == 1


def test_a_bfloat16_state_is_close() -> None:
    case = make(1, 40, window=9, dtype=torch.bfloat16, dim=16, value_dim=16)
    tensors = [case.q, case.k, case.v]
    wanted, _ = local_attention(*tensors, 9)
    o, _, _ = decode(tensors, 9, LocalState.empty(case.k, case.v, 9))
    assert o.dtype == torch.bfloat16
    torch.testing.assert_close(o, wanted, rtol=1e-2, atol=1e-2)


def test_a_state_that_does_not_fit_is_refused() -> None:
    case = make(2, 5, window=4)
    tensors = [case.q, case.k, case.v]
    other = LocalState.empty(case.k[:, :, :1], case.v[:, :, :1], 4)
    with pytest.raises(ValueError, match=r"state.k must be \[2, window, 2, 4\]"):
        go_on([x[:, :1] for x in tensors], 4, other)
    fitting = LocalState.empty(case.k, case.v, 4)
    with pytest.raises(ValueError, match="window must be that of the state, 4, got 5"):
        go_on(tensors, 5, fitting)
    with pytest.raises(ValueError, match=r"q must be \[B, T, H, D\]"):
        go_on([x[:, 0] for x in tensors], 4, fitting)
    with pytest.raises(ValueError, match="window must be at least 1"):
        LocalState.empty(case.k, case.v, 0)


def test_packed_sequences_go_with_no_state() -> None:
    case = make(1, 9, window=4)
    tensors, bounds = [case.q, case.k, case.v], torch.tensor([0, 4, 9])
    with pytest.raises(ValueError, match="cu_seqlens must be None with a state or output_state"):
        go_on(tensors, 4, None, cu_seqlens=bounds)
    state = LocalState.empty(case.k, case.v, 4)
    with pytest.raises(ValueError, match="cu_seqlens must be None with a state or output_state"):
        attend_locally(*tensors, 4, state=state, cu_seqlens=bounds)


@pytest.mark.parametrize("stateful", [False, True])
def test_lengths_alone_say_which_positions_are_real(stateful: bool) -> None:
    case, lengths = make(2, 9, window=4), torch.tensor([9, 6])
    tensors, real = [case.q, case.k, case.v], torch.arange(9) < lengths[:, None]
    options: dict[str, Any] = {"return_entropy": True, "output_state": stateful}
    expected = attend_locally(*tensors, 4, real=real, **options)
    found = attend_locally(*tensors, 4, lengths=lengths, **options)
    for got, wanted in zip(found[:2], expected[:2], strict=True):
        assert got is not None
        assert not got[1, 6:].any()
        assert torch.equal(got, wanted)
    with pytest.raises(ValueError, match=r"lengths must lie in \[0, T\] = \[0, 9\], got 10 at"):
        attend_locally(*tensors, 4, lengths=torch.tensor([9, 10]), **options)


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize(
    ("real", "lengths", "message"),
    [
        ([9, 6], [9, -2], r"lengths must lie in \[0, T\] = \[0, 9\], got -2 at index 1"),
        ([9, 6], [9, 7], "real must be True at the first 7 positions of row 1, as lengths say, got "
         "False at position 6"),
        ([9, 6], [8, 6], "real must be True at the first 8 positions of row 0, as lengths say, got "
         "True at position 8"),
    ],
)  # fmt: skip
def test_lengths_that_contradict_what_is_real_are_refused(
    stateful: bool, real: list[int], lengths: list[int], message: str
) -> None:
    case = make(2, 9, window=4)
    mask = torch.arange(9) < torch.tensor(real)[:, None]
    with pytest.raises(ValueError, match=message):
        attend_locally(
            case.q, case.k, case.v, 4, real=mask, lengths=torch.tensor(lengths),
            output_state=stateful,
        )  # fmt: skip


@pytest.mark.parametrize("stateful", [False, True])
def test_what_is_real_is_a_mask_of_all_positions(stateful: bool) -> None:
    case = make(2, 9, window=4)
    tensors = [case.q, case.k, case.v]
    with pytest.raises(TypeError, match=r"real must be bool .*, got torch\.int64"):
        attend_locally(*tensors, 4, real=torch.ones(2, 9).long(), output_state=stateful)
    with pytest.raises(ValueError, match=r"real must have shape \(2, 9\), got \(1, 9\)"):
        attend_locally(*tensors, 4, real=torch.ones(1, 9).bool(), output_state=stateful)


def test_a_row_without_a_token_keeps_its_state() -> None:
    case = make(2, 5, window=4)
    tensors = [case.q, case.k, case.v]
    _, _, state = go_on([x[:, :4] for x in tensors], 4, None)
    _, _, after = go_on([x[:, 4:] for x in tensors], 4, state, lengths=torch.tensor([1, 0]))
    assert after.seen.tolist() == [5, 4]
    assert torch.equal(after.k[1], state.k[1])


def test_a_step_takes_heads_in_any_order_and_sums_in_the_widest_type() -> None:
    case = make(3, 12, 4, 2, window=5, dtype=torch.float32)
    moved = [x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for x in (case.q, case.k)]
    tensors = [*moved, case.v.double()]
    wanted = local_attention(*tensors, 5, return_entropy=True)
    state = LocalState.empty(*tensors[1:], 5)
    for found, expected in zip(decode(tensors, 5, state)[:2], wanted, strict=True):
        torch.testing.assert_close(found, expected)
