"""Local attention on a GPU: fused Triton kernels. Import this package only where it is used."""

from .attention import attend_fused
from .rope import rotate

__all__ = ["attend_fused", "rotate"]
