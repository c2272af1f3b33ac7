"""The state that tokens leave behind, without what they retrieve: one product for each scale.

A sequence cut over processes needs it before anything else: a part can retrieve only once it knows
what the parts before it have left. Counted in products it is a third of `retention`'s forward.
"""

from typing import Any

import torch
from torch import Tensor

from vort.names import check_choice
from vort.ops.custom import without_autocast
from vort.ops.retention.inputs import NORMALIZERS, compute_dtype
from vort.ops.retention.state import RetentionState

__all__ = ["final_state"]


def final_state(
    k: Tensor, v: Tensor, write: Tensor, log_decay: Tensor, *, normalizer: str = "decayed"
) -> RetentionState:
    """What `retention` returns as the state after the last token, from an empty one before.

    Shapes as there: k `[B, T, H, K]`, v `[B, T, H, V]`, write `[B, T, H, S]`, log_decay `[S]` or
    `[H, S]`. Gradients flow to all four.

    >>> k, v = torch.rand(1, 100, 2, 16), torch.randn(1, 100, 2, 32)
    >>> final_state(k, v, torch.rand(1, 100, 2, 8), -torch.logspace(-3, 0, 8)).G.shape
    torch.Size([1, 2, 8, 16, 32])
    """
    check_choice("normalizer", normalizer, NORMALIZERS)
    dtype = compute_dtype(k, v)
    with without_autocast(k):
        length = torch.arange(k.shape[1] - 1, -1, -1, device=k.device, dtype=dtype)
        # [B, H, S, T]: what is left at the end of what each token wrote.
        rates = log_decay.to(dtype).expand(k.shape[2], -1).unsqueeze(-1)
        weight = write.to(dtype).permute(0, 2, 3, 1) * (rates * length).exp()
        heads = k.transpose(1, 2), v.transpose(1, 2).to(k.dtype)
        G: Tensor = _WeightedProducts.apply(*heads, weight)  # type: ignore[no-untyped-call]
        if normalizer == "none":
            return RetentionState(G, None)
        if normalizer == "undecayed":
            return RetentionState(G, heads[0].to(dtype).sum(2, keepdim=True))
        return RetentionState(G, weight @ heads[0].to(dtype))


class _WeightedProducts(torch.autograd.Function):
    """sum_t weight[s, t] k_t v_t^T for every s, of `[B, H, T, ·]`.

    A scale at a time, so that weighted keys are never there for all scales at once; the backward
    makes them again.
    """

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(k, v, weight)
        return torch.stack([_product((k * w).mT, v, weight.dtype) for w in _scales(weight, k)], 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, v, weight = ctx.saved_tensors
        (dG,) = grads
        dk, dv = torch.zeros_like(k, dtype=dG.dtype), torch.zeros_like(v, dtype=dG.dtype)
        dweight = torch.empty_like(weight)
        for s, w in enumerate(_scales(weight, k)):
            given = dG[:, :, s].to(k.dtype)
            toward = _product(v, given.mT, dG.dtype)
            dk += toward * w
            dv += _product(k * w, given, dG.dtype)
            dweight[:, :, s] = torch.linalg.vecdot(toward, k.to(dG.dtype))
        return dk.to(k.dtype), dv.to(v.dtype), dweight


def _scales(weight: Tensor, k: Tensor) -> list[Tensor]:
    """`[B, H, T, 1]` for each scale, in a type whose product with keys keeps theirs."""
    return [w.unsqueeze(-1).to(k.dtype) for w in weight.unbind(2)]


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b, summed and kept in `dtype` whatever the two are in."""
    if a.dtype == dtype or not a.is_cuda:
        return a.to(dtype) @ b.to(dtype)
    shape = a.shape[:-2]
    a, b = (x.flatten(0, 1) for x in (a, b))
    found: Tensor = torch.bmm(a, b, out_dtype=dtype).unflatten(0, shape)
    return found
