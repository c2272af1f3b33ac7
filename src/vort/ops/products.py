"""Products of a batch of matrices on a CPU, as fast as the machine has them.

PyTorch hands a batch to MKL as a whole. Where it is built without MKL (aarch64, macOS) it goes
through the batch itself, matrix by matrix: a microsecond or two for each, and fifty where the
second factor is transposed, for matrices that take one. There the functions below let NumPy do it,
whose loop is in C. Elsewhere, and for whatever PyTorch has to see, they are PyTorch's own.

A batch is one thread's: NumPy's library would share out every small matrix.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vort.ops.custom import traced
from vort.ops.gpu.launcher import transformed
from vort.threads import one_thread

__all__ = ["ONE_BY_ONE", "baddbmm", "baddbmm_", "bmm", "one_by_one"]

# Whether PyTorch goes through a batch by itself.
ONE_BY_ONE = not torch.backends.mkl.is_available()
# Products of fewer multiplications than this PyTorch does on the spot, sooner than a library would.
TINY = 128


def one_by_one(x: Tensor) -> bool:
    """Whether PyTorch would multiply a batch like x matrix by matrix, and another may do it.

    >>> one_by_one(torch.zeros(1, 1, 1, dtype=torch.int64))
    False
    """
    return (
        ONE_BY_ONE
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and not traced(x)
        and not transformed()
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._len_torch_dispatch_stack()
    )


def bmm(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`torch.bmm`: a [N, i, k] times b [N, k, j], to out [N, i, j] if it is given.

    >>> bmm(torch.ones(2, 3, 4), torch.ones(2, 5, 4).mT).unique()
    tensor([4.])
    """
    if not _taken(a, b):
        return torch.bmm(a, b, out=out)
    if a.shape[2] == 1:  # which NumPy leaves to no library
        return torch.mul(a, b, out=out)
    if out is None:
        out = a.new_empty(len(a), a.shape[1], b.shape[2])
    with one_thread:
        np.matmul(_array(a), _array(b), out=out.numpy())
    return out


def baddbmm(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """`torch.baddbmm`: beta c + alpha (a times b); c may be broadcast.

    >>> baddbmm(torch.ones(4), torch.ones(2, 3, 4), torch.ones(2, 4, 4), beta=-1, alpha=2).unique()
    tensor([7.])
    """
    if not _taken(a, b, c):
        return torch.baddbmm(c, a, b, beta=beta, alpha=alpha)
    product = bmm(a, b)
    return torch.add(c if beta == 1 else c * beta, product, alpha=alpha, out=product)


def baddbmm_(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`Tensor.baddbmm_`: add a times b to c [N, i, j], and return it.

    >>> baddbmm_(torch.ones(2, 3, 4), torch.ones(2, 3, 4), torch.ones(2, 4, 4)).unique()
    tensor([5.])
    """
    if not _taken(a, b, c):
        return c.baddbmm_(a, b)
    if a.shape[2] == 1:
        return c.addcmul_(a, b)
    return c.add_(bmm(a, b))


def _taken(a: Tensor, b: Tensor, *more: Tensor) -> bool:
    """Whether a product is NumPy's: not where PyTorch is as fast, nor where it keeps a history."""
    if not one_by_one(a) or a.shape[1] * a.shape[2] * b.shape[2] < TINY:
        return False
    return not torch.is_grad_enabled() or not any(x.requires_grad for x in (a, b, *more))


def _array(x: Tensor) -> "np.ndarray[Any, Any]":
    """x as NumPy sees it, in the same memory if a library can read it there."""
    *_, row, column = x.stride()
    if 0 in (row, column) or 1 not in (row, column):
        x = x.contiguous()
    return (x.detach() if x.requires_grad else x).numpy()
