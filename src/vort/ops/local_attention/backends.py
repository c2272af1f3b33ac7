"""Which form of local attention runs: the linear one in PyTorch, or GPU kernels where they fit."""

from typing import Literal, get_args

import torch
from torch import Tensor

from vort.ops.gpu.launcher import kernels_take, require_kernels

from .block import attend_blockwise

__all__ = ["BACKENDS", "WIDEST", "LocalBackend", "attend"]

LocalBackend = Literal["auto", "block", "exact", "triton"]
BACKENDS: tuple[str, ...] = get_args(LocalBackend)

# The widest head that the kernels hold in registers.
WIDEST = 128


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    *,
    scale: float,
    start: Tensor | None = None,
    valid: Tensor | None = None,
    return_entropy: bool = False,
    backend: LocalBackend = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Return what `attend_blockwise` returns, from the backend that suits device and dtype.

    Example:
        >>> q = torch.randn(1, 5, 4, 8)
        >>> attend(q, q, q, window=4, scale=0.5)[0].shape
        torch.Size([1, 5, 4, 8])
    """
    if backend == "auto":
        narrow = max(q.shape[-1], v.shape[-1]) <= WIDEST
        backend = "triton" if narrow and kernels_take(q, k, v) else "block"
    run = attend_blockwise
    if backend == "triton":
        require_kernels(q.device, "block")
        from .triton import attend_fused  # here and in rope.py alone: Triton may be absent

        run = attend_fused
    with torch.autocast(q.device.type, enabled=False):
        return run(
            q, k, v, window, scale=scale, start=start, valid=valid, return_entropy=return_entropy
        )
