"""The GPU kernels, run by Triton's interpreter on the CPU, against the basis in float64; when
they are chosen."""

import pytest
import torch

from tests.ops.interpreter import check_in_interpreter, claims_of, imports, needs_triton
from vort.fractional import PowerLawBasis
from vort.ops.order_weights import order_weights


@needs_triton
@pytest.mark.parametrize("claim", claims_of("order_weights"))
def test_fused_order_weights_in_the_interpreter(claim: str) -> None:
    check_in_interpreter("order_weights", claim)


def test_order_weights_on_a_cpu_do_not_import_the_kernels() -> None:
    code = (
        "import torch; from vort.memories import Router; "
        "Router(hidden_size=16, num_attention_heads=2, horizon=1000)(torch.ones(1, 3, 16)); "
    )
    assert not imports("vort.ops.order_weights.triton", code)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_order_weights_on_a_cpu_are_those_of_the_basis_to_the_bit(dtype: torch.dtype) -> None:
    basis = PowerLawBasis.fit(horizon=1000, terms=8)
    order = 0.05 + 0.95 * torch.rand(3, 5, dtype=dtype)
    gate = torch.rand(3, 5, dtype=dtype)
    assert torch.equal(order_weights(basis, order), basis.weights(order))
    assert torch.equal(order_weights(basis, order, gate), basis.weights(order) * gate[..., None])


@needs_triton
@pytest.mark.gpu
@pytest.mark.slow
def test_kernels_are_chosen_where_they_apply() -> None:
    from tests.ops.order_weights.cases import OrderCase, make_basis, make_inputs
    from vort.ops.order_weights.triton import order_weights_fused

    basis, inputs = make_basis(12, 3), make_inputs(OrderCase(), "cuda", 0)
    order, gate = inputs["order"], inputs["gate"]
    polynomials = basis.polynomials_on(order.device, order.dtype)
    chosen = order_weights(basis, order, gate)
    assert torch.equal(chosen, order_weights_fused(polynomials, order, gate))
    wide = order_weights(basis, order.double(), gate.double())
    assert wide.dtype == torch.float64
    torch.testing.assert_close(chosen, wide.float(), rtol=1e-4, atol=0)
