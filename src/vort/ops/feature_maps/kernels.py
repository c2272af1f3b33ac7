"""Whether a map's GPU kernels can take some tensors, asked without importing Triton."""

from torch import Tensor

from vort.ops.gpu.launcher import kernels_take

__all__ = ["WIDEST", "kernels_fit"]

# The most coordinates, and the most columns of a weight, that the kernels hold in registers.
WIDEST = 256


def kernels_fit(x: Tensor, matrix: Tensor, head_dim: int, columns: int) -> bool:
    """Whether kernels can map x `[..., head_dim]` through a matrix that has `columns` features.

    What does not fit together goes to PyTorch, which says so better.
    """
    fitting = 1 <= head_dim <= WIDEST and 1 <= columns <= WIDEST and x.shape[-1] == head_dim
    return fitting and matrix.device == x.device and kernels_take(x)
