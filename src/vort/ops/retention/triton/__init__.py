"""Retention on a GPU: fused Triton kernels. Import this package only where it is used."""

from .decode import retention_decode, retention_step_triton
from .op import retention_triton

__all__ = ["retention_decode", "retention_step_triton", "retention_triton"]
