"""The op against memories written down independently."""

import pytest
import torch
from torch import Tensor

from vort.fractional import PowerLawBasis
from vort.fractional.gl import gl_kernel
from vort.ops.retention import exact_retention_with_kernel, retention, shared_basis

BACKENDS = ["exact", "recurrent", "chunk"]


def retnet(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> Tensor:
    """RetNet's recurrence, S_n = gamma S_{n-1} + k_n^T v_n and o_n = q_n S_n, head by head."""
    out = torch.zeros_like(v)
    for batch in range(q.shape[0]):
        for head in range(q.shape[2]):
            memory = torch.zeros(q.shape[3], v.shape[3], dtype=q.dtype)
            for n in range(q.shape[1]):
                memory = gamma[head] * memory + torch.outer(k[batch, n, head], v[batch, n, head])
                out[batch, n, head] = q[batch, n, head] @ memory
    return out


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_scale_is_retnet(backend: str) -> None:
    q, k, v = (torch.randn(2, 70, 3, size, dtype=torch.float64) for size in (4, 4, 6))
    gamma = 1 - 2.0 ** (-5 - torch.arange(3, dtype=torch.float64))
    write = torch.ones(2, 70, 3, 1, dtype=torch.float64)
    log_decay = gamma.log().unsqueeze(-1)
    o, _ = retention(q, k, v, write, log_decay, normalizer="none", backend=backend)
    torch.testing.assert_close(o, retnet(q, k, v, gamma), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("normalizer", ["none", "decayed"])
def test_shared_basis_is_the_gl_kernel_within_its_certificate(
    backend: str, normalizer: str
) -> None:
    basis = PowerLawBasis.fit(horizon=1000, terms=8)
    batch, length, heads = 1, 300, 2
    # Positive terms cannot cancel, so a relative error of the kernel bounds that of the sum.
    q, k, v = (torch.rand(batch, length, heads, 4, dtype=torch.float64) for _ in range(3))
    order = 0.05 + 0.95 * torch.rand(batch, length, heads, dtype=torch.float64)
    write, log_decay = shared_basis(order, basis)
    o, _ = retention(q, k, v, write, log_decay.to(write), normalizer=normalizer, backend=backend)
    exact = exact_retention_with_kernel(q, k, v, order, gl_kernel, normalizer=normalizer)
    allowed = basis.certificate.relative * (1 if normalizer == "none" else 2.1)
    assert float(((o - exact) / exact).abs().max()) <= allowed * (1 + 1e-6) + 1e-9


def test_exact_with_an_exponential_kernel_is_exact() -> None:
    q, k, v = (torch.randn(2, 30, 2, size, dtype=torch.float64) for size in (4, 4, 3))
    order = torch.rand(2, 30, 2, dtype=torch.float64)
    for normalizer in ("decayed", "undecayed", "none"):
        for include_self in (True, False):
            found = exact_retention_with_kernel(
                q,
                k,
                v,
                order,
                lambda order, lag: order * torch.exp(-0.3 * lag.to(order)),
                normalizer=normalizer,
                include_self=include_self,
            )
            expected, _ = retention(
                q,
                k,
                v,
                order.unsqueeze(-1),
                torch.full((1,), -0.3, dtype=torch.float64),
                normalizer=normalizer,
                include_self=include_self,
                backend="exact",
            )
            torch.testing.assert_close(found, expected)
