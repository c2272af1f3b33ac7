"""Products of a batch on a CPU: PyTorch's and NumPy's are one, and NumPy has only what it may."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.ops.retention.cases import Case, assert_agrees, small_pieces
from vort.ops import products
from vort.ops.local_attention import local_attention, local_attention_exact
from vort.ops.products import baddbmm, baddbmm_, bmm, one_by_one
from vort.ops.retention import NORMALIZERS

# Shapes and strides of two factors, as the forms on a CPU have them.
PATTERNS = {
    "plain": ((6, 9, 8), (72, 8, 1), (6, 8, 7), (56, 7, 1)),
    "second transposed": ((6, 9, 8), (72, 8, 1), (6, 8, 7), (56, 1, 8)),
    "first transposed": ((6, 9, 8), (72, 1, 9), (6, 8, 7), (56, 7, 1)),
    "both transposed": ((6, 9, 8), (72, 1, 9), (6, 8, 7), (56, 1, 8)),
    "rows of a longer table": ((6, 9, 8), (180, 20, 1), (6, 8, 7), (0, 1, 9)),
    "one table for all": ((6, 9, 8), (72, 8, 1), (6, 8, 7), (0, 7, 1)),
    "a row": ((6, 1, 32), (32, 32, 1), (6, 32, 8), (256, 1, 32)),
    "a row of a column": ((6, 1, 32), (32, 1, 1), (6, 32, 8), (256, 8, 1)),
    "a column": ((6, 16, 32), (512, 32, 1), (6, 32, 1), (32, 1, 32)),
    "of one number": ((6, 16, 1), (16, 1, 1), (6, 1, 32), (32, 32, 1)),
    "of one number, transposed": ((6, 16, 1), (16, 1, 16), (6, 1, 32), (0, 1, 1)),
    "ones": ((6, 9, 8), (0, 0, 0), (6, 8, 7), (56, 7, 1)),
    "every second": ((6, 9, 8), (144, 16, 2), (6, 8, 7), (112, 2, 16)),
    "tokens of heads": ((4, 9, 8), (8, 32, 1), (4, 8, 7), (7, 28, 1)),
    "tiny": ((6, 2, 3), (6, 3, 1), (6, 3, 2), (6, 2, 1)),
    "none": ((0, 9, 8), (72, 8, 1), (0, 8, 7), (56, 7, 1)),
    "of none": ((6, 16, 0), (1, 1, 1), (6, 0, 32), (1, 32, 1)),
}
Watched = list[tuple[Any, ...]]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """NumPy's road is open; what goes down it."""
    calls: Watched = []
    matmul = np.matmul

    def watch(a: Any, b: Any, **options: Any) -> Any:
        calls.append((a, b))
        return matmul(a, b, **options)

    monkeypatch.setattr(products, "ONE_BY_ONE", True)
    monkeypatch.setattr(np, "matmul", watch)
    return calls


def strided(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True) if n)
    return torch.randn(max(size, 1), dtype=dtype).as_strided(shape, stride)


def close(found: Tensor, a: Tensor, b: Tensor, c: Tensor | float = 0, *, alpha: float = 1) -> None:
    wanted = c + alpha * torch.einsum("nik,nkj->nij", a.double(), b.double())
    assert found.dtype == a.dtype
    assert found.is_contiguous()
    precise = 1e-13 if a.dtype == torch.float64 else 2e-6
    scale = 1 + a.shape[2]
    torch.testing.assert_close(found.double(), wanted, rtol=precise * scale, atol=precise * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_products_are_those_of_float64(road: str, pattern: str, dtype: torch.dtype) -> None:
    shape_a, stride_a, shape_b, stride_b = PATTERNS[pattern]
    a, b = strided(shape_a, stride_a, dtype), strided(shape_b, stride_b, dtype)
    shape = (*shape_a[:2], shape_b[2])
    close(bmm(a, b), a, b)
    out = torch.full(shape, torch.nan, dtype=dtype)
    assert bmm(a, b, out=out) is out
    close(out, a, b)

    c = torch.randn(shape, dtype=dtype)
    before = c.double().clone()
    assert baddbmm_(c, a, b) is c
    close(c, a, b, before)
    for like in ((shape[2],), (*shape[:2], 1), shape):
        c = torch.randn(like, dtype=dtype)
        before = c.clone()
        close(baddbmm(c, a, b, beta=-1), a, b, -c.double())
        close(baddbmm(c, a, b, alpha=0.3), a, b, c.double(), alpha=0.3)
        assert torch.equal(c, before)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_factor_is_read_where_it_is_if_a_library_can(taken: Watched, pattern: str) -> None:
    shape_a, stride_a, shape_b, stride_b = PATTERNS[pattern]
    a, b = strided(shape_a, stride_a, torch.float32), strided(shape_b, stride_b, torch.float32)
    bmm(a, b)
    if pattern in ("tiny", "of one number", "of one number, transposed", "of none"):
        assert not taken  # PyTorch is sooner done
    elif pattern in ("ones", "every second"):
        ((first, _),) = taken
        assert first.strides[-1] == first.itemsize
    elif pattern != "none":
        ((first, second),) = taken
        assert np.shares_memory(first, a.numpy())
        assert np.shares_memory(second, b.numpy())


@pytest.mark.parametrize("function", [bmm, lambda a, b: baddbmm(a.new_ones(5), a, b)])
def test_what_pytorch_has_to_see_stays_with_it(
    taken: Watched, function: Callable[[Tensor, Tensor], Tensor]
) -> None:
    a, b = torch.randn(3, 6, 8), torch.randn(3, 8, 5)
    wanted = function(a, b)
    assert len(taken) == 1
    assert one_by_one(a)
    taken.clear()

    x = a.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(x, b).sum(), x)
    torch.testing.assert_close(gradient, b.sum(2)[:, None].expand_as(a))
    torch.testing.assert_close(torch.func.vmap(function)(a[None], b[None])[0], wanted)
    torch.testing.assert_close(torch.func.grad(lambda x: function(x, b).sum())(a), gradient)
    _, tangent = torch.func.jvp(lambda x: function(x, b), (a,), (torch.ones_like(a),))
    torch.testing.assert_close(tangent, b.sum(1)[:, None].expand_as(wanted))
    with torch.autocast("cpu", torch.bfloat16):
        assert function(a, b).dtype == torch.bfloat16
    assert function(a.bfloat16(), b.bfloat16()).dtype == torch.bfloat16
    assert function(a.to("meta"), b.to("meta")).device.type == "meta"
    with torch._subclasses.FakeTensorMode() as mode:
        assert function(mode.from_tensor(a), mode.from_tensor(b)).shape == wanted.shape
    counter = FlopCounterMode(display=False)
    with counter:
        function(a, b)
    assert counter.get_total_flops() == 2 * 3 * 6 * 8 * 5
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(a, b), wanted)
    assert not taken

    with torch.no_grad():  # nothing is kept, so nobody has to see
        torch.testing.assert_close(function(x, b), wanted)
    assert len(taken) == 1


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("read", [True, False])
def test_retention_by_chunks_is_exact_by_both_roads(road: str, read: bool, normalizer: str) -> None:
    case = Case(length=83, keys=8, values=9, num_scales=6, normalizer=normalizer, read=read)
    with small_pieces():
        assert_agrees(case, "chunk")


def test_local_attention_is_exact_by_both_roads(road: str) -> None:
    inputs = [torch.randn(2, 90, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    found = []
    for function in (local_attention, local_attention_exact):
        o, entropy = function(*inputs, 20, return_entropy=True)
        loss = o.square().sum() + entropy.sum()
        found.append([o, entropy, *torch.autograd.grad(loss, inputs)])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
