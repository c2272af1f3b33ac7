"""Retention on a GPU: fused Triton kernels. Import this package only where it is used."""

from .decode import retention_decode, retention_step_triton
from .op import retention_triton
from .pairs import pairs_pay

__all__ = ["pairs_pay", "retention_decode", "retention_step_triton", "retention_triton"]
