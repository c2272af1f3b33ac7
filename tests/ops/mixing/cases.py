"""A layer as one function against the same layer op by op: the same launches, hence equal bits.

But for a sum that the window's backward finds made, by another kernel: that is checked apart.
"""

from contextlib import AbstractContextManager, nullcontext
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
    lowered: torch.dtype | None = None,
    autocast: AbstractContextManager[Any] | None = None,
    length: int = 7,
) -> tuple[dict[str, Tensor], bool]:
    """Outputs and gradients of a layer after a norm, and whether it was one function.

    lowered: the type that `autocast` takes products in, and hence of what is added to x.
    """
    from vort.layers import RMSNorm, VortAttention, vort_attention

    torch.manual_seed(seed)
    layer = VortAttention(**(SIZES | changes)).to(device, dtype)
    norm = RMSNorm(32, eps=1e-6).to(device, dtype)
    with torch.no_grad():
        for p in (*layer.parameters(), *norm.parameters()):
            p.add_(0.1 * torch.randn(p.shape).to(p))
    x, delta, *back = (torch.randn(1, length, 32).to(device, dtype) for _ in range(4))
    delta = delta.to(lowered or dtype)
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
        autocast or nullcontext(),
    ):
        options = {"delta": delta, "output_orders": True, **(given or {})}
        total, y, _, order = layer.after_norm(norm, x, **options)
    named = {"x": x, "delta": delta, "norm": norm.weight} | dict(layer.named_parameters())
    outputs = [total, y, order]
    came = [back[0].to(total.dtype), back[1].to(y.dtype), torch.ones_like(order)]
    grads = torch.autograd.grad(outputs, list(named.values()), came, allow_unused=True)
    found = {f"d{n}": g for n, g in zip(named, grads, strict=True) if g is not None}
    return {"total": total, "y": y, "order": order} | found, taken == [True]


def difference(dtype: torch.dtype, device: str, seed: int) -> dict[str, float]:
    """For the GPU check: the share of numbers that differ, none; NaN where a way was not taken.

    With float32 weights also under autocast.
    """
    from vort.ops import mixing

    cases: dict[str, tuple[dict[str, Any], torch.dtype | None]]
    cases = {name: (changes, None) for name, changes in CASES.items()}
    if device == "cuda" and dtype == torch.float32:
        cases |= {f"{name}, autocast": (each, torch.bfloat16) for name, each in CASES.items()}
    errors = {}
    for name, (changes, lowered) in cases.items():
        found = []
        for at_once in (True, False):
            around = None if lowered is None else torch.autocast("cuda", lowered)
            options: dict[str, Any] = {"lowered": lowered, "autocast": around}
            with mock.patch.object(mixing, "room_for_dots", return_value=None):
                results = layer_results(changes, dtype, device, seed, at_once=at_once, **options)
            found.append(results)
        (got, taken), (wanted, other) = found
        for n, x in wanted.items():
            share = (got[n] != x).double().mean().item()
            errors[f"{name}: {n}"] = share if taken and not other else float("nan")
    return errors


def dots_errors(dtype: torch.dtype, device: str, seed: int) -> dict[str, float]:
    """do·o as the heads' norm leaves it, and gradients of a window made of it or of o.

    NaN where there is no room for it though there should be, or the other way around.
    """
    from vort.ops.custom import Some
    from vort.ops.linear.triton import NormInputs, gated_norm_back
    from vort.ops.local_attention.block import Inputs
    from vort.ops.local_attention.triton.attention import (
        WALKS,
        attend_back,
        attend_op,
        room_for_dots,
    )

    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    begins = torch.tensor([0] * 33 + [33] * 40 + [73] * 27, device=device)
    errors = {}
    for name, batch, length, heads, dim, window, start in (
        ("one block", 1, 20, 1, 16, 7, None),
        ("some blocks", 2, 150, 3, 20, 65, None),
        ("packed", 1, 100, 2, 16, 40, begins),
        ("far", 1, 300, 1, 16, 290, None),
    ):
        q, k, v, found = (normal(batch, length, heads, dim) for _ in range(4))
        inputs = Inputs(q, k, v, start, None, window, dim**-0.5, True)
        kept: Some = attend_op.forward(inputs)
        near, room = kept[0], room_for_dots(inputs, kept[2])
        if (room is None) != (name == "far" or dtype not in WALKS):
            return {f"{name}: room": float("nan")}
        gate, norm = normal(batch, length, heads * dim), normal(dim)
        ending = NormInputs(found, near, gate, norm, normal(24, heads * dim), 1e-6)
        dy, dentropy = normal(batch, length, 24), normal(batch, length, heads).float()
        plain = gated_norm_back(ending, (), (dy,), ())
        left = gated_norm_back(ending, (), (dy,), (), room)
        names = ("dx", "dother", "dgate", "dnorm", "dweight")
        pairs = dict(zip(names, zip(left, plain, strict=True), strict=True))
        do = left[1]
        if room is not None:
            dots = (do.double() * near.double()).sum(-1).transpose(1, 2)
            pairs["dots"] = room[..., :length], dots
        ways = (attend_back(inputs, kept, (do, dentropy), (), way) for way in (room, None))
        pairs |= dict(zip(("dq", "dk", "dv"), zip(*ways, strict=True), strict=True))
        for part, (got, wanted) in pairs.items():
            error = (got.double() - wanted.double()).norm() / wanted.double().norm()
            errors[f"{name}: {part}"] = error.item()
    return errors
