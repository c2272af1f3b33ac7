"""The kernels on a GPU: every gradient against float64, twice, into memory filled with NaN."""

import pytest
import torch

from vort.ops.order_weights import order_weights

pytest.importorskip("triton")
from tests.ops.order_weights.cases import (
    GPU_CASES,
    OrderCase,
    compiled_difference,
    make_basis,
    make_inputs,
    relative_errors,
)
from vort.ops.order_weights.triton import order_weights_fused

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.mark.parametrize("case", GPU_CASES, ids=lambda case: case.name)
def test_every_output_and_gradient_equals_exact(case: OrderCase) -> None:
    errors = relative_errors(case, torch.float32, "cuda", torch.seed() % 2**31)
    assert all(error <= 1e-4 for error in errors.values()), errors


def test_torch_compile_in_one_graph_gives_the_same_gradients() -> None:
    assert compiled_difference("cuda") <= 1e-5


def test_kernels_are_chosen_where_they_apply() -> None:
    basis, inputs = make_basis(12, 3), make_inputs(OrderCase(), "cuda", 0)
    order, gate = inputs["order"], inputs["gate"]
    polynomials = basis.polynomials_on(order.device, order.dtype)
    chosen = order_weights(basis, order, gate)
    assert torch.equal(chosen, order_weights_fused(polynomials, order, gate))
    wide = order_weights(basis, order.double(), gate.double())
    assert wide.dtype == torch.float64
    torch.testing.assert_close(chosen, wide.float(), rtol=1e-4, atol=0)
