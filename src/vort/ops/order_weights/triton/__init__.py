"""Order weights on a GPU: Triton kernels. Import this package only where it is used."""

from .op import order_weights_fused

__all__ = ["order_weights_fused"]
