"""Matrix products with what stands beside them in a block: gates, norms, the loss.

Each is what its few lines of PyTorch say. On a GPU `triton.py` computes cheap neighbours again in
the backward instead of keeping them, and the loss never has all logits at once.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vort.ops.custom import traced
from vort.ops.gpu.launcher import kernels_take
from vort.ops.rms_norm import rms_norm

__all__ = [
    "few_rows",
    "gated_linear",
    "gated_norm_linear",
    "is_plain",
    "linear_cross_entropy",
    "products",
]

# Up to so many rows a product is one of `few.py`.
FEW = 64


def is_plain(x: Tensor, *modules: nn.Module | None, kinds: tuple[type, ...] = ()) -> bool:
    """Whether products with x may be taken with the modules' weights, past the modules themselves.

    Only on a GPU, and only for linear layers that nobody has wrapped or hooked: adapters, quantised
    weights, hooks and biases are served by calling the module.

    Args:
        x: what is multiplied.
        *modules: what would be called; None: nothing.
        kinds: classes that count as linear, with biases; `nn.Linear` without one by default.
    """
    on_gpu = kernels_take(x) or (x.is_cuda and torch.is_autocast_enabled("cuda"))
    if not on_gpu or traced(x):
        return False
    return all(m is None or _is_bare(m, kinds) for m in modules)


def _is_bare(module: Any, kinds: tuple[type, ...]) -> bool:
    if type(module) not in (kinds or (nn.Linear,)) or type(module.weight) is not nn.Parameter:
        return False
    hooks: list[Any] = [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks]
    bias: Any = module.bias
    return (bool(kinds) or bias is None) and not any(hooks)


def few_rows(x: Tensor, *weights: Tensor) -> bool:
    """Whether `few.py` takes products of x with these weights: a step of decoding, on a GPU.

    >>> few_rows(torch.zeros(1, 8), torch.zeros(4, 8))
    False
    """
    if torch.is_grad_enabled() or not kernels_take(x, *weights) or traced(x):
        return False
    few = 0 < x.numel() <= FEW * x.shape[-1] and x.is_contiguous()
    dense = all(w.stride(-1) == 1 for w in weights)
    return few and dense and not torch.is_autocast_enabled("cuda")


def products(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """x, and x W^T for up to three weights W `[out, in]`; gradients to x are summed in one place.

    What else reads x should read the x that is returned.

    >>> x, w = torch.randn(2, 5, 8), torch.randn(3, 8)
    >>> [y.shape for y in products(x, w)]
    [torch.Size([2, 5, 8]), torch.Size([2, 5, 3])]
    """
    x, *weights = _for_products(x, *weights)  # type: ignore[assignment]
    if kernels_take(x, *weights) and not traced(x) and len(weights) <= 3:
        from .triton import products_fused

        return products_fused(x, *weights)
    return x, *(F.linear(x, w) for w in weights)


def gated_linear(both: Tensor, weight: Tensor) -> Tensor:
    """(silu(a) b) W^T for both = [a, b] `[..., 2 F]` and weight `[out, F]`: the end of a gated MLP.

    >>> gated_linear(torch.randn(2, 5, 12), torch.randn(8, 6)).shape
    torch.Size([2, 5, 8])
    """
    both, weight = _for_products(both, weight)
    if kernels_take(both, weight) and both.is_contiguous() and both.numel():
        from .triton import gated_linear_fused

        return gated_linear_fused(both, weight)
    a, b = both.chunk(2, -1)
    return F.linear(F.silu(a) * b, weight)


def gated_norm_linear(
    x: Tensor,
    weight: Tensor,
    *,
    other: Tensor | None = None,
    gate: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """(rms_norm(x + other) silu(gate)) W^T of heads: the end of an attention layer.

    Shapes: x and other `[..., H, D]`, gate `[..., H D]`, norm `[D]`, weight `[out, H D]`; the
    result `[..., out]`. What is None is left out.

    >>> gated_norm_linear(torch.randn(2, 5, 3, 4), torch.randn(8, 12)).shape
    torch.Size([2, 5, 8])
    """
    x, other, gate, weight = _for_products(x, other, gate, weight)
    given = [t for t in (x, other, gate, weight) if t is not None]
    known = norm is None or kernels_take(norm)
    if known and kernels_take(*given) and not traced(x) and x.numel():
        from .triton import gated_norm_linear_fused

        return gated_norm_linear_fused(x, other, gate, norm, weight, eps)
    mixed = x if other is None else x + other
    if norm is not None:
        mixed = rms_norm(mixed, norm, eps)
    mixed = mixed.flatten(-2)
    return F.linear(mixed if gate is None else mixed * F.silu(gate), weight)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = -100
) -> Tensor:
    """The sum of cross-entropies of logits x W^T against targets, float32.

    Shapes: x `[..., D]`, weight `[V, D]`, targets `[...]` integers below V, or `ignore_index`. On
    a GPU gradients are made along with the loss, a part of the rows at a time.

    >>> x, w = torch.randn(7, 4), torch.randn(10, 4)
    >>> targets = torch.tensor([1, 2, -100, 3, 4, 5, 9])
    >>> loss = linear_cross_entropy(x, w, targets)
    >>> torch.allclose(loss, F.cross_entropy(x @ w.T, targets, reduction="sum"), atol=1e-5)
    True
    """
    x, weight = _for_products(x, weight)
    x, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    if kernels_take(x, weight) and x.numel():
        from .triton import cross_entropy_fused

        return cross_entropy_fused(x.contiguous(), weight, targets.contiguous(), ignore_index)
    logits = F.linear(x, weight).float()
    return F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")


def _for_products(*tensors: Tensor | None) -> list[Tensor]:
    """In the type that autocast would take products in: casts that the backward knows of."""
    first = next(x for x in tensors if x is not None)
    if not first.is_cuda or not torch.is_autocast_enabled("cuda"):
        return list(tensors)  # type: ignore[arg-type]
    dtype = torch.get_autocast_dtype("cuda")
    return [x if x is None else x.to(dtype) for x in tensors]  # type: ignore[misc]
