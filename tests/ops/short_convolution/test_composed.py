"""The PyTorch form against the definition, states and packed sequences, and what is refused."""

from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch

from tests.ops.short_convolution.cases import CASES, HeadsCase, exact, make_inputs
from vort.ops.short_convolution import Heads, computed_again, short_convolution, to_heads


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_heads_equal_the_definition(case: HeadsCase) -> None:
    given = make_inputs(case, torch.float64, "cpu", 0)
    bounds = None if case.bounds is None else torch.tensor([*case.bounds, case.length])
    heads = to_heads(
        [given["x"]], case.heads, case.kv_heads, given["weight"], given["state"],
        q_norm=given["q_norm"], k_norm=given["k_norm"],
        rope_base=10000.0 if case.rope else None, seen=given["seen"], cu_seqlens=bounds,
    )  # fmt: skip
    assert not heads.mapped
    for got, wanted in zip(heads[:6], exact(replace(case, features=0), given), strict=True):
        torch.testing.assert_close(got, wanted)


def test_without_a_convolution_heads_are_the_projections() -> None:
    x = torch.randn(2, 5, 24)
    q, k, v, turned_q, turned_k, near_v, state, mapped, again = to_heads([x], 2, 1)
    assert torch.equal(torch.cat([q, k, v], 2).flatten(2), x)
    assert turned_q is q
    assert turned_k is k
    assert near_v is v
    assert not mapped
    assert state is None
    assert again is None


def test_turned_heads_computed_again_give_the_same_gradients() -> None:
    x = torch.randn(2, 5, 24, requires_grad=True)
    heads = Heads(*(h.contiguous() for h in to_heads([x], 2, 1, rope_base=1e4)[:6]), None)
    calls: list[int] = []

    def again() -> list[torch.Tensor]:
        calls.append(1)
        return [h.detach().clone() for h in (heads.turned_q, heads.turned_k)]

    def loss() -> torch.Tensor:
        both = heads.turned_q * heads.turned_k
        return (both.exp() * heads.turned_q).sum() + (heads.v * heads.near_v).sum()

    with computed_again(heads._replace(again=again)):
        y = loss()
    (grad,) = torch.autograd.grad(y, x, retain_graph=True)
    assert calls == [1]
    assert torch.equal(grad, torch.autograd.grad(loss(), x)[0])


class _Mark:
    pass


class _KeepsItsOutput(torch.autograd.Function):
    """Twice x; the case that can hold itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mark: Any) -> torch.Tensor:
        ctx.mark = mark
        y = 2 * x
        ctx.save_for_backward(y)
        return y


def test_a_forward_without_its_backward_leaves_nothing() -> None:
    heads = to_heads([torch.randn(2, 5, 24, requires_grad=True)], 2, 1)
    mark = _Mark()
    with computed_again(heads._replace(again=lambda: heads[:6])):
        y = _KeepsItsOutput.apply(heads.q, mark)
    found = ref(mark)
    del mark
    assert found() is not None
    del y
    assert found() is None


def test_turned_heads_that_are_computed_again_are_not_held() -> None:
    x = torch.randn(2, 5, 24, requires_grad=True)
    heads = Heads(*(h.contiguous() for h in to_heads([x], 2, 1, rope_base=1e4)[:6]), None)
    kept = [h.detach().clone() for h in (heads.turned_q, heads.turned_k)]
    with computed_again(heads._replace(again=lambda: kept)):
        y = (heads.turned_q * heads.turned_k).sum()
    found = ref(heads.turned_q)
    del heads
    assert found() is None
    y.backward()
    assert x.grad is not None


@pytest.mark.parametrize("cut", [0, 1, 2, 7])
def test_a_state_continues_a_sequence(cut: int) -> None:
    x, weight = torch.randn(2, 9, 6), torch.randn(6, 4)
    whole, last = short_convolution(x, weight, output_state=True)
    first, state = short_convolution(x[:, :cut], weight, output_state=True)
    rest, after = short_convolution(x[:, cut:], weight, state, output_state=True)
    torch.testing.assert_close(torch.cat([first, rest], 1), whole)
    assert last is not None
    assert after is not None
    assert torch.equal(after, last)


def test_rows_keep_their_own_last_inputs() -> None:
    x, weight = torch.randn(2, 6, 4), torch.randn(4, 3)
    x[1, 2:] = 0
    _, state = short_convolution(x, weight, lengths=torch.tensor([6, 2]), output_state=True)
    assert state is not None
    assert torch.equal(state[0], x[0, 4:])
    assert torch.equal(state[1], x[1, :2])


def test_bad_arguments_are_named() -> None:
    x, weight = torch.randn(2, 5, 4), torch.randn(4, 3)
    with pytest.raises(ValueError, match=r"weight \[C, W\], got \[2, 5, 4\] and \[5, 3\]"):
        short_convolution(x, torch.randn(5, 3))
    with pytest.raises(ValueError, match="at least 2 taps, got 1"):
        short_convolution(x, weight[:, :1])
    with pytest.raises(ValueError, match=r"state must be \[2, 2, 4\], got \[2, 3, 4\]"):
        short_convolution(x, weight, torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match="cu_seqlens needs B = 1"):
        short_convolution(x, weight, cu_seqlens=torch.tensor([0, 2, 5]))
    with pytest.raises(ValueError, match=r"lengths must lie in \[0, T\] = \[0, 5\], got 6 at"):
        short_convolution(x, weight, lengths=torch.tensor([5, 6]), output_state=True)
    with pytest.raises(ValueError, match=r"lengths must be \[B\] = \[2\], got \[1\]"):
        short_convolution(x, weight, lengths=torch.tensor([5]), output_state=True)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([0, 3], "must start at 0 and end at T=5, got 0 and 3"),
        ([2, 5], "must start at 0 and end at T=5, got 2 and 5"),
        ([0, 4, 2, 5], "must not decrease, got 4, 2 at index 1"),
    ],
)
def test_bad_bounds_are_named(bounds: list[int], message: str) -> None:
    x, weight, given = torch.randn(1, 5, 8), torch.randn(8, 3), torch.tensor(bounds)
    with pytest.raises(ValueError, match=message):
        short_convolution(x, weight, cu_seqlens=given)
    with pytest.raises(ValueError, match=message):
        to_heads([x], 2, 1, weight, cu_seqlens=given)


def test_packed_sequences_leave_no_state() -> None:
    x, weight = torch.randn(1, 5, 4), torch.randn(4, 3)
    with pytest.raises(ValueError, match="output_state must be off with cu_seqlens"):
        short_convolution(x, weight, cu_seqlens=torch.tensor([0, 2, 5]), output_state=True)


def test_parts_of_heads_are_computed_again_too() -> None:
    made = torch.randn(6, 1, 9, 2, 4)
    heads = Heads(*(x.clone().requires_grad_() for x in made), None, again=lambda: list(made[3:5]))  # type: ignore[arg-type]
    for number in (3, 4):
        whole = heads[number]
        assert isinstance(whole, torch.Tensor)
        with computed_again(heads):
            part = whole[:, 2:]
            square = (part * part).sum()
        with torch.no_grad():
            whole.data.zero_()  # what was kept would be zero now
        square.backward()
        assert whole.grad is not None
        assert whole.grad[:, 2:].equal(2 * made[number][:, 2:])
        assert not whole.grad[:, :2].any()
