"""What a token of each order writes to each scale: a basis's weights, times a gate.

`PowerLawBasis.weights` is the definition; it takes some thirty passes over `[..., S]`. On a GPU
`triton.py` writes the result in one.
"""

import torch
from torch import Tensor

from vort.fractional import PowerLawBasis
from vort.ops.gpu.launcher import kernels_take

__all__ = ["order_weights"]


def order_weights(
    basis: PowerLawBasis,
    order: Tensor,
    gate: Tensor | None = None,
    *,
    validate: bool | None = False,
) -> Tensor:
    """Return `basis.weights(order)` times `gate`, which all scales of a token share.

    Shapes: order and gate `[...]`, the result `[..., S]` float32 (float64 for float64 orders).
    Orders must lie in [order_min, 1]; `validate` says whether they are checked, None as in
    `PowerLawBasis.weights`.

    Example:
        >>> basis = PowerLawBasis.fit(horizon=1000, terms=8)
        >>> order_weights(basis, torch.tensor([0.3, 1.0]), torch.tensor([0.5, 0.5])).shape
        torch.Size([2, 8])
    """
    if gate is not None and gate.shape != order.shape:
        raise ValueError(
            f"gate must have the shape of order {list(order.shape)}, got {list(gate.shape)}"
        )
    if _fused(order, gate):
        from .triton import order_weights_fused

        return order_weights_fused(basis.polynomials_on(order.device, order.dtype), order, gate)
    weights = basis.weights(order, validate=validate)
    return weights if gate is None else weights * gate.unsqueeze(-1)


def _fused(order: Tensor, gate: Tensor | None) -> bool:
    """Whether kernels can do it: on a GPU, in float32, with a gate like the orders."""
    if order.dtype != torch.float32 or not kernels_take(order):
        return False
    return gate is None or (gate.dtype == order.dtype and gate.device == order.device)
