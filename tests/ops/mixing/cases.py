"""A layer as one function against the same layer op by op: the same launches, hence equal bits."""

from typing import Any
from unittest import mock

import torch
from torch import Tensor

SIZES = {
    "hidden_size": 32, "num_attention_heads": 2, "sliding_window": 3, "horizon": 100,
    "num_scales": 2, "num_features": 4,
}  # fmt: skip
# What a layer may be without, or have besides.
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "little": {
        "sliding_window": 0, "conv_size": 0, "output_gate": False, "normalizer": "none",
    },
    "other": {
        "qk_norm": False, "output_norm": False, "use_entropy": False, "write_gain": "scale",
        "read_weights": False, "normalizer": "undecayed", "include_self": False,
    },
}  # fmt: skip


def layer_results(
    changes: dict[str, Any],
    dtype: torch.dtype,
    device: str,
    seed: int,
    *,
    at_once: bool,
    given: dict[str, Tensor] | None = None,
) -> tuple[dict[str, Tensor], bool]:
    """Outputs and gradients of a layer after a norm, and whether it was one function."""
    from vort.layers import RMSNorm, VortAttention, vort_attention

    torch.manual_seed(seed)
    layer = VortAttention(**(SIZES | changes)).to(device, dtype)
    norm = RMSNorm(32, eps=1e-6).to(device, dtype)
    with torch.no_grad():
        for p in (*layer.parameters(), *norm.parameters()):
            p.add_(0.1 * torch.randn(p.shape).to(p))
    x, delta, *back = (torch.randn(1, 7, 32).to(device, dtype) for _ in range(4))
    x.requires_grad_()
    delta.requires_grad_()
    known = vort_attention.attention_at_once
    taken = []

    def watched(*given: Any) -> Any:
        found = known(*given) if at_once else None
        taken.append(found is not None)
        return found

    with (
        mock.patch.object(vort_attention, "attention_at_once", watched),
        mock.patch.object(vort_attention, "FEW", 1),  # products of few rows are joined otherwise
    ):
        options = {"delta": delta, "output_orders": True, **(given or {})}
        total, y, _, order = layer.after_norm(norm, x, **options)
    named = {"x": x, "delta": delta, "norm": norm.weight} | dict(layer.named_parameters())
    outputs = [total, y, order]
    grads = torch.autograd.grad(
        outputs, list(named.values()), [*back, torch.ones_like(order)], allow_unused=True
    )
    found = {f"d{n}": g for n, g in zip(named, grads, strict=True) if g is not None}
    return {"total": total, "y": y, "order": order} | found, taken == [True]


def difference(dtype: torch.dtype, device: str, seed: int) -> dict[str, float]:
    """For the GPU check: the share of numbers that differ, none; NaN where a way was not taken."""
    errors = {}
    for name, changes in CASES.items():
        got, taken = layer_results(changes, dtype, device, seed, at_once=True)
        wanted, other = layer_results(changes, dtype, device, seed, at_once=False)
        for n, x in wanted.items():
            unequal = (got[n] != x).double().mean().item()
            errors[f"{name}: {n}"] = unequal if taken and not other else float("nan")
    return errors
