"""Retention on a GPU: fused Triton kernels. Import this package only where it is used."""

from .op import retention_triton

__all__ = ["retention_triton"]
