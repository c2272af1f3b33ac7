"""Matrix products with what stands beside them in a block: gates, norms, the loss.

Each is what its few lines of PyTorch say. On a GPU `triton.py` computes cheap neighbours again in
the backward instead of keeping them, and the loss never has all logits at once.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from vort.ops.custom import traced
from vort.ops.gpu.launcher import kernels_take
from vort.ops.rms_norm import rms_norm

__all__ = [
    "Norm",
    "few_rows",
    "gated_mlp",
    "gated_norm_linear",
    "is_added_to",
    "is_bare",
    "is_plain",
    "is_watched",
    "linear_cross_entropy",
    "multiplied_by_kernels",
    "product_type",
    "products",
]

# Up to so many rows a product is one of `few.py`; as many weights may be multiplied by one x.
FEW, MOST = 64, 8
# A program of the norms' kernels holds a whole row.
WIDEST = 8192


def is_plain(x: Tensor, *modules: nn.Module | None, kinds: tuple[type, ...] = ()) -> bool:
    """Whether products with x may be taken with the modules' weights, past the modules themselves.

    Only on a GPU, and only for linear layers that nobody has wrapped or hooked: adapters, quantised
    weights, hooks and biases are served by calling the module.

    Args:
        x: what is multiplied.
        *modules: what would be called; None: nothing.
        kinds: classes that count as linear, with biases; `nn.Linear` without one by default.
    """
    on_gpu = kernels_take(x) or autocasts(x)
    if not on_gpu or traced(x):
        return False
    return all(m is None or is_bare(m, kinds) for m in modules)


def is_watched(*modules: nn.Module) -> bool:
    """Whether somebody has hooked, replaced or compiled the call of a module, and must be called.

    Hugging Face's accelerate replaces `forward` on the instance. Hooks of all modules count.
    """
    if _has_any_global_hook():
        return True
    for m in modules:  # of every layer several times a step: plain loops are short
        own = m.__dict__
        if (
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or "forward" in own
            or m._compiled_call_impl is not None
        ):
            return True
    return False


def is_bare(module: Any, kinds: tuple[type, ...] = ()) -> bool:
    """Whether a module's weights may be taken past it; `kinds` as for `is_plain`."""
    if type(module) not in (kinds or (nn.Linear,)) or type(module.weight) is not nn.Parameter:
        return False
    return (bool(kinds) or module.bias is None) and not is_watched(module)


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


class Norm(NamedTuple):
    """An RMS norm that is taken of x before anything else: its weight `[D]`, its eps."""

    weight: Tensor
    eps: float


def products(
    x: Tensor,
    *groups: Sequence[Tensor],
    delta: Tensor | None = None,
    norm: Norm | None = None,
) -> tuple[Tensor, ...]:
    """x + delta, its norm n, and n W^T for each group of weights. What is None is left out.

    A group is weights `[out, in]` whose rows are joined: one product for all of them. Gradients to
    the sum are added up in one place: what else reads it or n should read those returned.

    >>> x, w = torch.randn(2, 5, 8), torch.randn(3, 8)
    >>> [y.shape for y in products(x, [w, w])]
    [torch.Size([2, 5, 8]), torch.Size([2, 5, 8]), torch.Size([2, 5, 6])]
    """
    weights = [w for group in groups for w in group]
    if few_rows(x, *weights) and 0 < len(weights) <= MOST:
        return _few_products(x, groups, delta, norm)
    if not _takes_all(x, delta, norm, weights):
        total = x if delta is None else x + delta
        _, *found = products(total if norm is None else rms_norm(total, *norm), *groups)
        return total, *found
    if multiplied_by_kernels(x, *weights) and len(weights) <= MOST:
        from .triton import products_fused

        weight, eps = (None, 0.0) if norm is None else norm
        x = x if norm is not None else _as_multiplied(x)
        return products_fused(x, groups, delta, weight, eps, product_type(x))
    x = _as_multiplied(x)
    return x, x, *(F.linear(x, w[0] if len(w) == 1 else torch.cat(list(w))) for w in groups)


def gated_mlp(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    delta: Tensor | None = None,
    norm: Norm | None = None,
) -> tuple[Tensor, Tensor]:
    """x + delta, and of its norm n the gated MLP (silu(n G^T) n U^T) D^T.

    Shapes: x and delta `[..., D]`, gate and up `[F, D]`, down `[D, F]`. What is None is left out.

    >>> x, w = torch.randn(2, 5, 8), torch.randn(6, 8)
    >>> total, y = gated_mlp(x, w, w, w.T.contiguous(), delta=x)
    >>> y.shape, torch.equal(total, x + x)
    (torch.Size([2, 5, 8]), True)
    """
    weights = [gate, up, down]
    if few_rows(x, *weights):
        from .few import few_gated, few_products

        total = x if delta is None else x + delta
        return total, few_products(few_gated(total, gate, up, norm=norm), down)
    if not _takes_all(x, delta, norm, weights):
        total = x if delta is None else x + delta
        normed = total if norm is None else rms_norm(total, *norm)
        return total, gated_mlp(normed, *weights)[1]
    if multiplied_by_kernels(x, *weights):
        from .triton import gated_mlp_fused

        if norm is None:
            return x, gated_mlp_fused(_as_multiplied(x), gate, up, down, None, None, 0.0)[1]
        return gated_mlp_fused(x, gate, up, down, delta, *norm, product_type(x))
    return x, F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def _few_products(
    x: Tensor, groups: Sequence[Sequence[Tensor]], delta: Tensor | None, norm: Norm | None
) -> tuple[Tensor, ...]:
    """`products` of few rows: they take as long as a launch, so one for all."""
    from .few import few_products

    total = x if delta is None else x + delta
    normed = total if norm is None else rms_norm(total, *norm)
    joined = few_products(normed, *(w for group in groups for w in group))
    return total, normed, *joined.split([sum(w.shape[0] for w in g) for g in groups], -1)


def _takes_all(
    x: Tensor, delta: Tensor | None, norm: Norm | None, weights: Sequence[Tensor]
) -> bool:
    """Whether the ops take sum and norm too, the sum being of the type of x."""
    if norm is None:
        return delta is None
    if not multiplied_by_kernels(x, *weights) or not kernels_take(norm.weight):
        return False
    return is_added_to(x, delta) and x.shape[-1] <= WIDEST and len(weights) <= MOST


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
    x, other, gate = (None if t is None else _as_multiplied(t) for t in (x, other, gate))  # type: ignore[assignment]
    given = [t for t in (x, other, gate) if t is not None]
    known = norm is None or kernels_take(norm)
    if known and kernels_take(*given) and multiplied_by_kernels(x, weight):
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
    """The sum of cross-entropies of logits x W^T against targets; float32, of float64 float64.

    Shapes: x `[..., D]`, weight `[V, D]`, targets `[...]` integers below V, or `ignore_index`. On
    a GPU gradients are made along with the loss, a part of the rows at a time.

    >>> x, w = torch.randn(7, 4), torch.randn(10, 4)
    >>> targets = torch.tensor([1, 2, -100, 3, 4, 5, 9])
    >>> loss = linear_cross_entropy(x, w, targets)
    >>> torch.allclose(loss, F.cross_entropy(x @ w.T, targets, reduction="sum"), atol=1e-5)
    True
    """
    if targets.shape != x.shape[:-1]:
        raise ValueError(
            f"targets must be {list(x.shape[:-1])} to go with x, got {list(targets.shape)}"
        )
    x = _as_multiplied(x)
    x, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    if multiplied_by_kernels(x, weight, traces=True):
        from .triton import cross_entropy_fused

        return cross_entropy_fused(x.contiguous(), weight, targets.contiguous(), ignore_index)
    logits = F.linear(x, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")


def autocasts(x: Tensor) -> bool:
    """Whether autocast says what type products with x are taken in; on a GPU alone here."""
    return x.is_cuda and torch.is_autocast_enabled("cuda")


def product_type(x: Tensor) -> torch.dtype:
    """The type that products with x are taken in: autocast's on a GPU, otherwise its own.

    >>> product_type(torch.zeros(3))
    torch.float32
    """
    return torch.get_autocast_dtype("cuda") if autocasts(x) else x.dtype


def multiplied_by_kernels(x: Tensor, *weights: Tensor, traces: bool = False) -> bool:
    """Whether the ops take products of x with these weights: all of one type, but for autocast.

    Under it x may be of any type that kernels know, the weights of another, and products be taken
    in a third.

    traces: whether there is an operator, for whatever traces.
    """
    if (traced(x) and not traces) or not x.numel():
        return False
    if not autocasts(x):
        return kernels_take(x, *weights)
    lowered = product_type(x) in (torch.bfloat16, torch.float32)
    return lowered and kernels_take(x) and (not weights or kernels_take(*weights))


def is_added_to(x: Tensor, delta: Tensor | None) -> bool:
    """Whether kernels add a delta to x, if there is one, and the sum has the type of x."""
    if delta is None:
        return True
    wide = torch.promote_types(x.dtype, delta.dtype) == x.dtype
    return wide and delta.shape == x.shape and kernels_take(delta)


def _as_multiplied(x: Tensor) -> Tensor:
    """In the type of `product_type`: a cast that the backward knows of."""
    return x.to(product_type(x))
