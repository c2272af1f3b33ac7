"""Rotary position embedding: q·k comes to depend on the distance of the two positions."""

import torch
from torch import Tensor

from vort.ops.gpu.launcher import kernels_take


def apply_rope(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """Return `x` with coordinate pairs (i, i + D/2) turned by positions · base^(-2i/D).

    Shapes: x `[..., T, H, D]` with D even, positions `[T]` (or any shape that broadcasts against
    `[..., T]`); the result has the shape and type of `x`.

    Example:
        >>> x = torch.randn(1, 5, 2, 8)
        >>> near = apply_rope(x, torch.arange(5))
        >>> far = apply_rope(x, torch.arange(5) + 1000)
        >>> torch.allclose(near[0, 4, 0] @ near[0, 1, 0], far[0, 4, 0] @ far[0, 1, 0], atol=1e-4)
        True
    """
    dim = x.shape[-1]
    if dim % 2:
        raise ValueError(f"RoPE turns pairs: the head dimension must be even, got {dim}")
    if not base > 0:
        raise ValueError(f"rope_base must be positive, got {base}")
    if _fused(x, positions):
        from .triton import rotate

        turned: Tensor = rotate(x, positions, base)
        return turned
    return turn(x, *angles_of(x, positions, base))


def apply_rope_to_both(
    q: Tensor, k: Tensor, positions: Tensor, base: float
) -> tuple[Tensor, Tensor]:
    """`apply_rope` of queries and keys at the same positions: angles are computed once."""
    alike = q.device == k.device and q.dtype == k.dtype and q.shape[-1] == k.shape[-1]
    if not alike or q.shape[-1] % 2 or not base > 0 or _fused(q, positions):
        return apply_rope(q, positions, base), apply_rope(k, positions, base)
    cos, sin = angles_of(q, positions, base)
    return turn(q, cos, sin), turn(k, cos, sin)


def angles_of(x: Tensor, positions: Tensor, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[..., T, 1, D / 2]` of what x is turned by."""
    dim = x.shape[-1]
    # Angles in float64: at position 10^6 a float32 angle is already off by several hundredths.
    wide = torch.float32 if x.device.type == "mps" else torch.float64
    exponents = torch.arange(0, dim, 2, device=x.device, dtype=wide) / dim
    angles = positions.to(x.device, wide)[..., None, None] * base**-exponents
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return angles.cos().to(dtype), angles.sin().to(dtype)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x `[..., T, H, D]` with its pairs turned; the type stays."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)


def _fused(x: Tensor, positions: Tensor) -> bool:
    """Whether kernels can do it: on a GPU, with a position for each token or one for all rows."""
    rows = positions.ndim == 1 or positions.shape[:-1] in ((1,), x.shape[:1])
    known = x.ndim == 4 and rows and positions.shape[-1] == x.shape[1]
    return known and positions.device == x.device and kernels_take(x)
