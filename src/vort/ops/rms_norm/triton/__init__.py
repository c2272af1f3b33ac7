"""RMS norm on a GPU: Triton kernels. Import this package only where it is used."""

from .op import rms_norm_fused

__all__ = ["rms_norm_fused"]
