"""Errors that name the argument, what was given and what is allowed."""

from itertools import pairwise

import torch
from torch import Tensor

# The widest head that the GPU kernels hold in registers.
WIDEST = 128


def check_window(window: int) -> None:
    """Refuse a window that does not hold the current position."""
    if isinstance(window, float):
        raise TypeError(f"window must be a whole number, got {window!r}")
    if window < 1:
        raise ValueError(f"window must be at least 1 (the position itself), got {window}")


def check_heads(q: Tensor, k: Tensor, v: Tensor, *, layout: str = "[B, T, H, D]") -> None:
    """Refuse q, k, v whose shapes, heads or devices do not belong together."""
    rank = layout.count(",") + 1
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != rank:
            raise ValueError(f"{name} must be {layout}, got shape {tuple(x.shape)}")
        if not x.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")
        if x.shape[:-2] != q.shape[:-2]:
            raise ValueError(
                f"{name} must have the batch and length of q, {tuple(q.shape[:-2])}, "
                f"got shape {tuple(x.shape)}"
            )
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k must have the head dimension of q, {q.shape[-1]}, got {k.shape[-1]}")
    if v.shape[-2] != k.shape[-2]:
        raise ValueError(f"v must have the heads of k, {k.shape[-2]}, got {v.shape[-2]}")
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"heads of q must be a multiple of those of k, got {heads} and {kv_heads}")


def check_padding_mask(mask: Tensor | None, shape: torch.Size, name: str = "padding_mask") -> None:
    """Refuse a mask that is not boolean or does not have one entry for each position."""
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise TypeError(f"{name} must be bool (True for real tokens), got {mask.dtype}")
    if mask.shape != shape:
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(mask.shape)}")


def check_cu_seqlens(
    cu_seqlens: Tensor | None, batch: int, length: int, *, values: bool = True
) -> None:
    """Refuse boundaries that do not run from 0 to T without decreasing.

    values: whether to look at the numbers too, which makes a GPU wait.
    """
    if cu_seqlens is None:
        return
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(
            f"cu_seqlens must be a tensor [N + 1] of integers, got {type(cu_seqlens).__name__}"
        )
    if batch != 1:
        raise ValueError(f"cu_seqlens needs packed sequences with batch size 1, got {batch}")
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2:
        raise ValueError(f"cu_seqlens must be [N + 1], got shape {tuple(cu_seqlens.shape)}")
    if cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool:
        raise TypeError(f"cu_seqlens must hold integers, got {cu_seqlens.dtype}")
    if torch.compiler.is_compiling() or not values:
        return  # reading values would break the graph
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != length:
        raise ValueError(
            f"cu_seqlens must start at 0 and end at T={length}, got {bounds[0]} and {bounds[-1]}"
        )
    for index, (left, right) in enumerate(pairwise(bounds)):
        if right < left:
            raise ValueError(f"cu_seqlens must not decrease, got {left}, {right} at index {index}")
