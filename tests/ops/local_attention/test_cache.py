"""Decoding with the ring buffer gives what the whole sequence gives."""

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vort.ops.local_attention import (
    LocalAttentionCache,
    local_attention,
    local_attention_prefill,
    local_attention_step,
)

from .cases import make


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: LocalAttentionCache,
    padding_mask: Tensor | None = None,
    rope_base: float | None = None,
) -> tuple[Tensor, Tensor, LocalAttentionCache]:
    outputs, entropies = [], []
    for t in range(q.shape[1]):
        o, entropy, cache = local_attention_step(
            cache,
            q[:, t],
            k[:, t],
            v[:, t],
            rope_base=rope_base,
            padding_mask=None if padding_mask is None else padding_mask[:, t],
            return_entropy=True,
        )
        assert entropy is not None
        outputs.append(o)
        entropies.append(entropy)
    return torch.stack(outputs, 1), torch.stack(entropies, 1), cache


@pytest.mark.parametrize("window", [1, 5, 16, 100])
@pytest.mark.parametrize("rope_base", [None, 1e4])
def test_steps_equal_the_whole_in_float32(window: int, rope_base: float | None) -> None:
    case = make(2, 60, 4, 2, dim=8, value_dim=6, window=window, dtype=torch.float32)
    wanted, wanted_entropy = local_attention(
        case.q, case.k, case.v, window, rope_base=rope_base, return_entropy=True
    )
    cache = LocalAttentionCache.empty(2, window, 2, 8, 6)
    o, entropy, cache = decode(case.q, case.k, case.v, cache, rope_base=rope_base)
    torch.testing.assert_close(o, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy, wanted_entropy, rtol=1e-6, atol=2e-6)
    assert int(cache.seen) == 60


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    steps=st.integers(0, 6),
    window=st.integers(1, 50),
    padded=st.booleans(),
    rope=st.booleans(),
)
def test_pieces_and_steps_equal_the_whole(
    lengths: list[int], steps: int, window: int, padded: bool, rope: bool
) -> None:
    total = sum(lengths) + steps
    case = make(2, total, 2, 1, window=window)
    mask = torch.rand(2, total) < 0.7 if padded else None
    rope_base = 1e4 if rope else None
    wanted, wanted_entropy = local_attention(
        case.q,
        case.k,
        case.v,
        window,
        rope_base=rope_base,
        padding_mask=mask,
        return_entropy=True,
    )
    cache, at, outputs, entropies = None, 0, [], []
    for length in lengths:
        piece = slice(at, at + length)
        o, entropy, cache = local_attention_prefill(
            *(x[:, piece] for x in (case.q, case.k, case.v)),
            window,
            cache=cache,
            rope_base=rope_base,
            padding_mask=None if mask is None else mask[:, piece],
            return_entropy=True,
        )
        outputs.append(o)
        entropies.append(entropy)
        at += length
    assert cache is not None
    if steps:
        rest = (x[:, at:] for x in (case.q, case.k, case.v))
        o, entropy, cache = decode(
            *rest, cache, None if mask is None else mask[:, at:], rope_base=rope_base
        )
        outputs.append(o)
        entropies.append(entropy)
    torch.testing.assert_close(torch.cat(outputs, 1), wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.cat(entropies, 1), wanted_entropy, rtol=1e-10, atol=1e-10)
    assert int(cache.seen) == total


@pytest.mark.parametrize("length", [0, 1, 3, 8, 9, 29])
def test_prefill_leaves_the_cache_that_steps_leave(length: int) -> None:
    case = make(1, length, window=8)
    _, _, filled = local_attention_prefill(case.q, case.k, case.v, 8, rope_base=1e4)
    stepped = LocalAttentionCache.empty(1, 8, 2, 4, 3, dtype=torch.float64)
    for t in range(length):
        _, _, stepped = local_attention_step(
            stepped, case.q[:, t], case.k[:, t], case.v[:, t], rope_base=1e4
        )
    for got, wanted in zip(filled, stepped, strict=True):
        torch.testing.assert_close(got, wanted)


def test_memory_of_the_cache_is_constant() -> None:
    case = make(1, 50, window=6)
    cache = LocalAttentionCache.empty(1, 6, 2, 4, 3, dtype=torch.float64)
    shapes = [x.shape for x in cache]
    _, _, cache = decode(case.q, case.k, case.v, cache)
    assert [x.shape for x in cache] == shapes


def test_a_step_leaves_the_given_cache_alone() -> None:
    case = make(1, 20, window=6)
    _, _, cache = local_attention_prefill(case.q, case.k, case.v, 6)
    kept = [x.clone() for x in cache]
    local_attention_step(cache, case.q[:, 0], case.k[:, 0], case.v[:, 0])
    for got, wanted in zip(cache, kept, strict=True):
        assert torch.equal(got, wanted)


def test_gradients_flow_through_the_cache() -> None:
    case = make(1, 12, window=5)
    whole, pieces = case.leaves(), case.leaves()
    wanted, _ = local_attention(*whole, 5)
    first, _, cache = local_attention_prefill(*(x[:, :6] for x in pieces), 5)
    second, _, _ = decode(*(x[:, 6:] for x in pieces), cache)
    got = torch.cat([first, second], 1)
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
    step = torch.compile(local_attention_step, backend=counter, fullgraph=True)
    compiled = plain = LocalAttentionCache.empty(1, 4, 2, 4, 3)
    for t in range(14):
        inputs = (case.q[:, t], case.k[:, t], case.v[:, t])
        got, _, compiled = step(compiled, *inputs, rope_base=1e4)
        wanted, _, plain = local_attention_step(plain, *inputs, rope_base=1e4)
        torch.testing.assert_close(got, wanted)
    assert counter.frame_count == 1


def test_bfloat16_cache_is_close() -> None:
    case = make(1, 40, window=9, dtype=torch.bfloat16, dim=16, value_dim=16)
    wanted, _ = local_attention(case.q, case.k, case.v, 9)
    cache = LocalAttentionCache.empty(1, 9, 2, 16, dtype=torch.bfloat16)
    o, _, _ = decode(case.q, case.k, case.v, cache)
    assert o.dtype == torch.bfloat16
    torch.testing.assert_close(o, wanted, rtol=1e-2, atol=1e-2)


def test_a_cache_that_does_not_fit_is_refused() -> None:
    case = make(2, 5, window=4)
    cache = LocalAttentionCache.empty(2, 4, 1, 4, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"cache.k must be \[2, window, 2, 4\]"):
        local_attention_step(cache, case.q[:, 0], case.k[:, 0], case.v[:, 0])
    fitting = LocalAttentionCache.empty(2, 4, 2, 4, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="window must be that of the cache, 4, got 5"):
        local_attention_prefill(case.q, case.k, case.v, 5, cache=fitting)
    with pytest.raises(ValueError, match=r"q must be \[B, H, D\]"):
        local_attention_step(fitting, case.q, case.k, case.v)
    with pytest.raises(ValueError, match="window must be at least 1"):
        LocalAttentionCache.empty(2, 0, 2, 4)
