"""The loss of eq. retrieval-loss: its definition, its linear forms, its gradients."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from tests.plasticity.cases import BASIS, FINE_BASIS, Case, case, cases
from vort.fractional import gl_kernel
from vort.ops import feature_map, shared_basis
from vort.plasticity import (
    Retrievals,
    order_loss,
    retrieval_loss,
    retrieval_loss_exact,
    retrieval_weights,
)
from vort.plasticity import loss as loss_module


def written(problem: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Write weights, and rates in float64."""
    return BASIS.weights(problem.order), torch.from_numpy(-BASIS.rates)


@given(cases)
def test_weights_are_shares_of_the_past(problem: Case) -> None:
    p = retrieval_weights(problem.q, problem.k, problem.order)
    torch.testing.assert_close(p[:, :, 1:].sum(-1), torch.ones_like(p[:, :, 1:, 0]))
    assert bool((p.triu() == 0).all())


@given(cases)
def test_blocks_equal_the_definition(problem: Case) -> None:
    loss = retrieval_loss(problem.q, problem.k, *written(problem), problem.retrievals)
    exact = retrieval_loss_exact(*problem, kernel=BASIS.kernel)
    torch.testing.assert_close(loss, exact, rtol=1e-10, atol=1e-10)


@given(cases)
def test_features_equal_the_definition_with_their_similarity(problem: Case) -> None:
    phi = feature_map("elu", 4)
    q, k = phi(problem.q), phi(problem.k)
    loss = retrieval_loss(q, k, *written(problem), problem.retrievals, similarity="features")
    # One feature for each pair of positions makes the dot product any matrix of similarities.
    similar = torch.einsum("bthk,bihk->bhti", q, k).log()
    heads = torch.arange(q.shape[2])
    rows = torch.eye(q.shape[1], dtype=q.dtype)[None, :, None].expand(*q.shape[:3], -1)
    keys = similar[:, heads].permute(0, 3, 1, 2)
    exact = retrieval_loss_exact(
        rows * math.sqrt(q.shape[1]), keys, *problem[2:], kernel=BASIS.kernel
    )
    torch.testing.assert_close(loss, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("similarity", ["exp", "features"])
def test_gradients_equal_finite_differences(similarity: str) -> None:
    problem = case(length=7, batch=1, heads=1)
    phi = feature_map("elu", 4)
    q, k = (phi(x) if similarity == "features" else x for x in problem[:2])
    decay = torch.from_numpy(-BASIS.rates)
    read = torch.rand(*problem.order.shape, BASIS.terms, dtype=torch.float64) + 0.5

    def loss(q, k, order, read):  # type: ignore[no-untyped-def]
        return retrieval_loss(
            q,
            k,
            BASIS.weights(order),
            decay,
            problem.retrievals,
            read=read,
            similarity=similarity,  # type: ignore[arg-type]
        )

    leaves = [x.clone().requires_grad_() for x in (q, k, problem.order, read)]
    assert torch.autograd.gradcheck(loss, leaves)


@settings(max_examples=20)
@given(cases)
def test_gradient_to_orders_is_that_of_the_exact_kernel(problem: Case) -> None:
    order = problem.order.clone().requires_grad_()
    given_by_gl = retrieval_loss_exact(problem.q, problem.k, order, problem.retrievals).sum()
    (exact,) = torch.autograd.grad(given_by_gl, order)
    for basis, tolerance in ((BASIS, 0.03), (FINE_BASIS, 5e-4)):
        found = order_loss(problem.q, problem.k, order, problem.retrievals, basis)
        (gradient,) = torch.autograd.grad(found, order)
        largest = float(exact.abs().max())
        assert float((gradient - exact).abs().max()) <= tolerance * largest + 1e-12


def test_gradients_of_the_exact_loss_equal_finite_differences() -> None:
    problem = case(length=40, batch=1, heads=1, share=0.2)
    order = problem.order.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: retrieval_loss_exact(problem.q, problem.k, x, problem.retrievals), [order]
    )


@given(st.floats(0.05, 1), st.integers(1, 2000))
def test_a_longer_memory_weighs_more_at_every_lag(order: float, lag: int) -> None:
    value = torch.tensor(order, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(gl_kernel(value, torch.tensor(lag)), value)
    assert float(slope) > 0


@given(cases)
def test_e23_tokens_nobody_asks_for_only_fall(problem: Case) -> None:
    order = problem.order.clone().requires_grad_()
    loss = retrieval_loss_exact(problem.q, problem.k, order, problem.retrievals).sum()
    (gradient,) = torch.autograd.grad(loss, order)
    idle = ~problem.retrievals.is_source(order.shape[1])
    assert bool((gradient[idle] >= 0).all())
    last = problem.retrievals.queries.amax(1, keepdim=True)
    seen = idle & (torch.arange(order.shape[1]) < last)
    assert bool((gradient[seen] > 0).all())


@given(cases)
def test_e23_what_happens_to_an_order_is_decided_later(problem: Case) -> None:
    """A query's loss reaches the orders of all tokens before it, its source's too, and no other."""
    order = problem.order.clone().requires_grad_()
    loss = retrieval_loss_exact(problem.q, problem.k, order, problem.retrievals).sum()
    (gradient,) = torch.autograd.grad(loss, order)
    last = problem.retrievals.queries.amax(1, keepdim=True)
    after = torch.arange(order.shape[1]) >= last
    assert bool((gradient[after] == 0).all())


def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = case(share=1.0)
    whole = retrieval_loss(problem.q, problem.k, *written(problem), problem.retrievals)
    monkeypatch.setattr(loss_module, "_PAIRS", 1)
    parts = retrieval_loss(problem.q, problem.k, *written(problem), problem.retrievals)
    torch.testing.assert_close(whole, parts)


@pytest.mark.parametrize("similarity", ["exp", "features"])
def test_memory_kept_for_the_backward_pass_is_linear_in_the_length(similarity: str) -> None:
    def kept(length: int) -> int:
        problem = case(length=length, batch=1, heads=1, share=1.0)
        order = problem.order.float().requires_grad_()
        q, k = (x.float().abs() for x in problem[:2])
        sizes: dict[int, int] = {}

        def note(x: torch.Tensor) -> torch.Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            write, decay = shared_basis(order, BASIS)
            retrieval_loss(q, k, write, decay, problem.retrievals, similarity=similarity)  # type: ignore[arg-type]
        return sum(sizes.values())

    short, long = kept(256), kept(1024)
    assert long < 5 * short


def test_a_sequence_without_queries_has_no_loss() -> None:
    problem = case(length=10)
    nobody = Retrievals.of(torch.full((2, 10), -1))
    loss = retrieval_loss(problem.q, problem.k, *written(problem), nobody)
    assert torch.equal(loss, torch.zeros_like(loss))


def test_half_precision_inputs_are_summed_in_float32() -> None:
    problem = case()
    q, k = problem.q.bfloat16(), problem.k.bfloat16()
    write, decay = shared_basis(problem.order.float(), BASIS)
    low = retrieval_loss(q, k, write, decay, problem.retrievals)
    assert low.dtype == torch.float32
    torch.testing.assert_close(
        low, retrieval_loss(q.float(), k.float(), write, decay, problem.retrievals)
    )


def test_arguments_that_do_not_fit_are_named() -> None:
    problem = case()
    write, decay = written(problem)
    with pytest.raises(ValueError, match='similarity must be "exp" or "features", got \'dot\''):
        retrieval_loss(problem.q, problem.k, write, decay, problem.retrievals, similarity="dot")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must agree, got shapes \(2, 24, 2, 4\), \(2, 23"):
        retrieval_loss(problem.q, problem.k[:, 1:], write, decay, problem.retrievals)
    alone = Retrievals(*(x[:1] for x in problem.retrievals))
    with pytest.raises(ValueError, match="retrievals must have 2 rows as q has, got 1"):
        retrieval_loss(problem.q, problem.k, write, decay, alone)
    with pytest.raises(ValueError, match=r"order must broadcast to \[B, T, H\] = \[2, 24, 2\]"):
        order_loss(problem.q, problem.k, torch.ones(5), problem.retrievals, BASIS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"read": torch.ones(2, 24, 2, 3)}, r"read must have write's shape \[2, 24, 2, 8\], got"),
        ({"log_decay": -torch.ones(3)}, r"log_decay must be \[8\] or \[2, 8\] .*, got \[3\]"),
        ({"log_decay": torch.tensor(-0.1)}, r"log_decay must be \[8\] or \[2, 8\] .*, got \[\]"),
        ({"log_decay": torch.full((8,), 0.1)}, "log_decay must be <= 0, got 0.1"),
        ({"log_decay": torch.full((2, 8), math.nan)}, "log_decay must be <= 0, got nan"),
        (
            {"retrievals": Retrievals(*(torch.full((2, 1), x) for x in (30, 3, 1)))},
            "retrievals must ask at positions below T = 24, got 30",
        ),
        ({"q": -torch.ones(2, 24, 2, 4)}, "features whose products are >= 0, got a cosine of -1"),
    ],
)
def test_what_the_loss_would_take_for_something_else_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    problem = case()
    write, decay = written(problem)
    ones = torch.ones(2, 24, 2, 4)
    fitting = {"q": ones, "k": ones, "write": write, "log_decay": decay}
    arguments = {**fitting, "retrievals": problem.retrievals, **changes}
    with pytest.raises(ValueError, match=message):
        retrieval_loss(**arguments, similarity="features")


@pytest.mark.parametrize("similarity", ["exp", "features"])
def test_tensors_without_numbers_have_a_loss_of_a_shape(similarity: Any) -> None:
    def shape(**options: Any) -> torch.Size:
        q, write = (torch.ones(2, 5, 3, size, **options) for size in (4, 8))
        found = (torch.ones(2, 1, dtype=kind, **options) for kind in (int, int, bool))
        decay = -torch.ones(8, **options)
        return retrieval_loss(q, q, write, decay, Retrievals(*found), similarity=similarity).shape

    assert shape(device="meta") == (2, 3)
    with FakeTensorMode():
        assert shape() == (2, 3)


def test_features_of_opposite_signs_are_found_whatever_their_types() -> None:
    problem = case()
    write, decay = written(problem)
    k = torch.ones(2, 24, 2, 4, dtype=torch.bfloat16)
    for q, dtype in ((k, torch.float32), (1e-6 * k, torch.float16), (k, torch.bfloat16)):
        with pytest.raises(ValueError, match="got a cosine of -1"):
            retrieval_loss(-q.to(dtype), k, write, decay, problem.retrievals, similarity="features")


def test_features_of_either_sign_are_taken_where_their_products_have_one() -> None:
    problem = case()
    phi = feature_map("taylor", 4)
    for dtype in (torch.float64, torch.bfloat16):
        q, k = (phi(3 * x.to(dtype)) for x in problem[:2])
        loss = retrieval_loss(q, k, *written(problem), problem.retrievals, similarity="features")
        assert bool(torch.isfinite(loss).all())
