"""The linear form gives what the definition gives: values, entropies and all gradients."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from vort.ops.local_attention import block, local_attention, local_attention_exact

from .cases import Case, cases, make


def run(function: Any, case: Case, seed: int = 9) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return output, entropy and the gradients of a random projection of both."""
    leaves = case.leaves()
    o, entropy = function(*leaves, case.window, return_entropy=True, **case.options)
    generator = torch.Generator().manual_seed(seed)
    loss = sum(
        (x.double() * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum()
        for x in (o, entropy)
    )
    return o, entropy, list(torch.autograd.grad(loss, leaves))


def relative(got: Tensor, wanted: Tensor) -> float:
    if wanted.numel() == 0:
        return 0.0
    error = (got.double() - wanted).abs().max()
    # Inputs are of size one; a floor keeps gradients that are exactly zero from dividing by it.
    return (error / wanted.abs().max().clamp(min=0.2)).item()


@settings(max_examples=150)
@given(case=cases())
def test_block_equals_exact_in_float64(case: Case) -> None:
    o, entropy, grads = run(local_attention, case)
    wanted_o, wanted_entropy, wanted_grads = run(local_attention_exact, case)
    torch.testing.assert_close(o, wanted_o, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(entropy, wanted_entropy, rtol=1e-10, atol=1e-10)
    for got, wanted in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8)


@settings(max_examples=25)
@given(case=cases())
def test_output_without_entropy_is_the_same(case: Case) -> None:
    leaves = case.leaves()
    o, entropy = local_attention(*leaves, case.window, **case.options)
    wanted, _ = local_attention_exact(*leaves, case.window, **case.options)
    assert entropy is None
    torch.testing.assert_close(o, wanted, rtol=1e-10, atol=1e-10)
    grads = torch.autograd.grad(o.square().sum(), leaves)
    wanted_grads = torch.autograd.grad(wanted.square().sum(), leaves)
    for got, expected in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)]
)
@pytest.mark.parametrize("window", [1, 33, 128])
def test_low_precision_is_close(dtype: torch.dtype, tolerance: float, window: int) -> None:
    low = make(2, 333, 4, 2, dim=32, value_dim=32, window=window, dtype=dtype, rope_base=1e4)
    high = Case(low.q.double(), low.k.double(), low.v.double(), window, low.options)
    o, entropy, grads = run(local_attention, low)
    wanted_o, wanted_entropy, wanted_grads = run(local_attention_exact, high)
    assert o.dtype == dtype
    assert entropy.dtype == torch.float32
    assert relative(o, wanted_o) < tolerance
    assert relative(entropy, wanted_entropy) < tolerance
    for got, wanted in zip(grads, wanted_grads, strict=True):
        assert got.dtype == dtype
        assert relative(got, wanted) < tolerance


def test_many_tiles_give_what_one_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(2, 500, 4, 2, window=40, padding_mask=torch.rand(2, 500) < 0.8)
    o, entropy, grads = run(local_attention, case)
    monkeypatch.setattr(block, "TILE_CPU", 1)
    small_o, small_entropy, small_grads = run(local_attention, case)
    torch.testing.assert_close(small_o, o, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(small_entropy, entropy, rtol=1e-12, atol=1e-12)
    for got, wanted in zip(small_grads, grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rope_base": 100.0},
        {"cu_seqlens": torch.tensor([0, 3, 3, 9])},
        {"padding_mask": torch.tensor([[False, True, True, False, True, True, True, True, False]])},
    ],
)
def test_gradients_of_output_and_entropy_pass_gradcheck(options: dict[str, Any]) -> None:
    case = make(1, 9, 2, 1, dim=4, value_dim=3, window=4)

    def function(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        o, entropy = local_attention(*leaves, case.window, return_entropy=True, **options)
        assert entropy is not None
        return o, entropy

    assert torch.autograd.gradcheck(function, case.leaves())


def test_entropy_alone_sends_gradient_to_queries_and_keys() -> None:
    q, k, v = make(1, 30, window=7).leaves()
    _, entropy = local_attention(q, k, v, 7, return_entropy=True)
    assert entropy is not None
    entropy.sum().backward()
    assert q.grad is not None
    assert k.grad is not None
    assert q.grad.abs().max() > 1e-3
    assert k.grad.abs().max() > 1e-3
    assert v.grad is None or (v.grad == 0).all()


def test_registered_operator_obeys_the_rules_of_torch_library() -> None:
    q, k, v = make(1, 9, window=4).leaves()
    for with_entropy in (True, False):
        torch.library.opcheck(
            torch.ops.vort.local_attention.default,
            (q, k, v, None, None, 4, 0.5, with_entropy),
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [5, 128])
def test_gpu_agrees_with_float64_on_the_cpu(dtype: torch.dtype, window: int) -> None:
    options = {"padding_mask": torch.rand(2, 700) < 0.9, "rope_base": 1e4}
    low = make(2, 700, 4, 2, dim=64, value_dim=64, window=window, dtype=dtype, **options)
    high = Case(low.q.double(), low.k.double(), low.v.double(), window, low.options)
    device = Case(
        *(x.cuda() for x in (low.q, low.k, low.v)),
        window,
        {"padding_mask": options["padding_mask"].cuda(), "rope_base": 1e4},
    )
    leaves = device.leaves()
    o, entropy = local_attention(*leaves, window, return_entropy=True, **device.options)
    assert entropy is not None
    wanted_o, wanted_entropy, wanted_grads = run(local_attention_exact, high)
    generator = torch.Generator().manual_seed(9)
    parts = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (o, entropy)]
    loss = sum((x.double().cpu() * part).sum() for x, part in zip((o, entropy), parts, strict=True))
    tolerance = 1e-2 if dtype == torch.bfloat16 else 2e-5
    assert relative(o.cpu(), wanted_o) < tolerance
    assert relative(entropy.cpu(), wanted_entropy) < tolerance
    for got, wanted in zip(torch.autograd.grad(loss, leaves), wanted_grads, strict=True):
        assert relative(got.cpu(), wanted) < tolerance
