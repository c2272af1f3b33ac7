"""What local attention promises beyond agreeing with its definition."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vort.ops.local_attention import LocalBackend, apply_rope, local_attention

from .cases import Case, cases, make


def attend(case: Case, **more: Any) -> tuple[Tensor, Tensor]:
    o, entropy = local_attention(
        case.q, case.k, case.v, case.window, return_entropy=True, **{**case.options, **more}
    )
    assert entropy is not None
    return o, entropy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("length", "window"), [(40, 7), (200, 64), (333, 128)])
@pytest.mark.parametrize("entropy", [True, False])
def test_changing_position_t_leaves_the_past_bit_identical(
    dtype: torch.dtype, length: int, window: int, entropy: bool
) -> None:
    case = make(2, length, 4, 2, dim=8, value_dim=8, window=window, dtype=dtype, rope_base=1e4)
    before = local_attention(case.q, case.k, case.v, window, return_entropy=entropy, **case.options)
    for t in (1, length // 3, length - 1):
        q, k, v = (x.clone() for x in (case.q, case.k, case.v))
        for x in (q, k, v):
            x[:, t:] = 50 * torch.randn_like(x[:, t:])
        after = local_attention(q, k, v, window, return_entropy=entropy, **case.options)
        assert torch.equal(after[0][:, :t], before[0][:, :t])
        assert not torch.equal(after[0][:, t:], before[0][:, t:])
        if entropy:
            assert torch.equal(after[1][:, :t], before[1][:, :t])


@settings(max_examples=30)
@given(case=cases())
def test_entropy_lies_between_zero_and_the_logarithm_of_the_window(case: Case) -> None:
    _, entropy = attend(case)
    positions = torch.arange(case.q.shape[1])
    bound = (positions + 1).clamp(max=case.window).double().log()
    assert (entropy >= -1e-12).all()
    assert (entropy <= bound[None, :, None] + 1e-12).all()


def test_equal_scores_have_the_largest_entropy() -> None:
    case = make(1, 50, window=8)
    _, entropy = attend(case, scale=0.0)
    bound = torch.arange(1, 51).clamp(max=8).double().log()
    torch.testing.assert_close(entropy, bound[None, :, None].expand(1, 50, 2))


def test_huge_scores_stay_finite() -> None:
    q, k, v = make(1, 70, window=20, dtype=torch.float32, spread=1e4).leaves()
    o, entropy = local_attention(q, k, v, 20, return_entropy=True)
    assert entropy is not None
    assert o.isfinite().all()
    (o.sum() + entropy.sum()).backward()
    for x in (q, k, v):
        assert x.grad is not None
        assert x.grad.isfinite().all()


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=5),
    window=st.integers(1, 80),
    rope=st.booleans(),
)
def test_packed_sequences_are_what_each_is_alone(
    lengths: list[int], window: int, rope: bool
) -> None:
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    total = int(bounds[-1])
    case = make(1, total, 2, 1, window=window, rope_base=1e4 if rope else None)
    packed = attend(case, cu_seqlens=bounds)
    for left, right in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        parts = (x[:, left:right] for x in (case.q, case.k, case.v))
        alone = attend(Case(*parts, window, case.options))
        for got, wanted in zip(packed, alone, strict=True):
            torch.testing.assert_close(got[:, left:right], wanted, rtol=1e-11, atol=1e-11)


def test_nothing_passes_between_packed_sequences() -> None:
    bounds = torch.tensor([0, 30, 30, 75, 100])
    q, k, v = make(1, 100, window=40).leaves()
    o, entropy = local_attention(q, k, v, 40, cu_seqlens=bounds, return_entropy=True)
    assert entropy is not None
    (o[:, 30:75].sum() + entropy[:, 30:75].sum()).backward()
    for x in (q, k, v):
        assert x.grad is not None
        assert (x.grad[:, :30] == 0).all()
        assert (x.grad[:, 75:] == 0).all()
    with torch.no_grad():
        for x in (q, k, v):
            x[:, :30] += 100
            x[:, 75:] -= 100
        changed, _ = local_attention(q, k, v, 40, cu_seqlens=bounds, return_entropy=True)
    assert torch.equal(changed[:, 30:75], o[:, 30:75])


@pytest.mark.parametrize("backend", ["block", "exact"])
def test_padding_is_ignored_whatever_it_holds(backend: LocalBackend) -> None:
    mask = torch.rand(2, 90) < 0.6
    mask[0] = False
    mask[1, :20] = False
    leaves = make(2, 90, window=10).leaves()
    for x in leaves:
        x.data[~mask] = float("nan")
    o, entropy = local_attention(
        *leaves, 10, padding_mask=mask, return_entropy=True, backend=backend
    )
    assert entropy is not None
    assert (o[~mask] == 0).all()
    assert (entropy[~mask] == 0).all()
    (o.square().sum() + entropy.sum()).backward()
    for x in leaves:
        assert x.grad is not None
        assert x.grad.isfinite().all()
        assert (x.grad[~mask] == 0).all()


def test_left_padding_is_a_shift() -> None:
    case = make(1, 60, window=9, rope_base=1e4)
    padded = [torch.cat([torch.randn_like(x[:, :13]), x], 1) for x in (case.q, case.k, case.v)]
    mask = torch.arange(73)[None] >= 13
    got = attend(Case(*padded, 9, case.options), padding_mask=mask)
    for mine, wanted in zip(got, attend(case), strict=True):
        torch.testing.assert_close(mine[:, 13:], wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("entropy", [True, False])
def test_saved_memory_is_linear_in_length(entropy: bool) -> None:
    def saved_bytes(length: int) -> int:
        total = 0

        def pack(x: Tensor) -> Tensor:
            nonlocal total
            total += x.numel() * x.element_size()
            return x

        leaves = make(1, length, window=64, dtype=torch.float32).leaves()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            local_attention(*leaves, 64, rope_base=1e4, return_entropy=entropy)
        return total

    assert 0 < saved_bytes(2048) <= 2.1 * saved_bytes(1024)
    # Nothing of the size of the scores is kept: some numbers for each position.
    assert saved_bytes(2048) < 2048 * 2 * 4 * 40


def test_autocast_takes_mixed_types_and_computes_in_float32() -> None:
    q, k, v = make(1, 50, window=9, dtype=torch.float32, dim=8, value_dim=8).leaves()
    wanted, wanted_entropy = local_attention(q, k, v, 9, return_entropy=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same, _ = local_attention(q, k, v, 9)
        o, entropy = local_attention(q, k.bfloat16(), v.bfloat16(), 9, return_entropy=True)
    assert torch.equal(same, local_attention(q, k, v, 9)[0])
    assert o.dtype == torch.bfloat16
    assert entropy is not None
    torch.testing.assert_close(o.float(), wanted, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(entropy, wanted_entropy, rtol=2e-2, atol=2e-2)
    o.float().sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32


def test_checkpointing_gives_the_same_gradients() -> None:
    leaves = make(1, 80, window=9).leaves()

    def loss(*x: Tensor) -> Tensor:
        o, entropy = local_attention(*x, 9, rope_base=1e4, return_entropy=True)
        assert entropy is not None
        return o.sum() + entropy.square().sum()

    plain = torch.autograd.grad(loss(*leaves), leaves)
    again = torch.autograd.grad(checkpoint(loss, *leaves, use_reentrant=False), leaves)
    for got, wanted in zip(again, plain, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_into_one_graph_for_every_length(packed: bool) -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None) -> Tensor:
        o, entropy = local_attention(
            q, k, v, 9, rope_base=1e4, cu_seqlens=bounds, return_entropy=True
        )
        assert entropy is not None
        return o.square().sum() + entropy.sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (40, 57, 130):
        leaves = make(1, length, 4, 2, window=9).leaves()
        bounds = torch.tensor([0, 10, 10, length]) if packed else None
        got = torch.autograd.grad(compiled(*leaves, bounds), leaves)
        wanted = torch.autograd.grad(loss(*leaves, bounds), leaves)
        for mine, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_rope_depends_on_distance_alone_even_far_out() -> None:
    x = torch.randn(1, 40, 2, 16)
    near, far = (apply_rope(x, torch.arange(40) + shift) for shift in (0, 1_000_000))
    near_scores = torch.einsum("bihd,bjhd->bhij", near, near)
    far_scores = torch.einsum("bihd,bjhd->bhij", far, far)
    torch.testing.assert_close(near_scores, far_scores, rtol=1e-4, atol=1e-4)


def test_rope_keeps_lengths_and_leaves_position_zero() -> None:
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    turned = apply_rope(x, torch.arange(5))
    assert torch.equal(turned[:, 0], x[:, 0])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    angle = 3 * math.pow(10000.0, -2 / 8)
    wanted = x[..., 1] * math.cos(angle) - x[..., 5] * math.sin(angle)
    torch.testing.assert_close(turned[:, 3, :, 1], wanted[:, 3])


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("backend", ["block", "exact"])
def test_what_is_wrong_with_one_packed_sequence_reaches_no_other(
    which: int, value: float, backend: LocalBackend
) -> None:
    bounds = torch.tensor([0, 7, 7, 8, 40, 75])
    case = make(1, 75, 4, 2, window=9, cu_seqlens=bounds, rope_base=1e4)
    others = torch.arange(75) < 8
    others[40:] = True
    results = []
    for spoilt in (False, True):
        leaves = case.leaves()
        if spoilt:
            leaves[which].data[0, 20] = value
        o, entropy = local_attention(
            *leaves, 9, return_entropy=True, backend=backend, **case.options
        )
        loss = o[:, others].square().sum() + entropy[:, others].sum()
        gradients = torch.autograd.grad(loss, leaves)
        results.append([x[:, others] for x in (o, entropy, *gradients)])
    torch.testing.assert_close(results[1], results[0])


def test_the_definition_is_as_exact_under_autocast_and_for_mixed_types() -> None:
    case = make(1, 30, 4, 2, dtype=torch.float32)
    expected, entropy = attend(case, backend="exact")
    with torch.autocast("cpu", torch.bfloat16):
        found = attend(case, backend="exact")
    assert torch.equal(found[0], expected)
    assert torch.equal(found[1], entropy)
    wide = Case(case.q, case.k, case.v.double(), case.window)
    for backend in ("exact", "block"):
        assert attend(wide, backend=backend)[1].dtype == torch.float64
