"""Feature maps on a GPU: fused Triton kernels. Import this package only where it is used."""

from .favor import favor_fused
from .hedgehog import hedgehog_fused

__all__ = ["favor_fused", "hedgehog_fused"]
