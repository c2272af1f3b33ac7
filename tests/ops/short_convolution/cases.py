"""Shapes and options to check, and the relative error of every output and gradient.

The truth is the equation in float64 on the very inputs the kernels get. Errors are
`|x - truth| / |truth|`, NaN never passes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.ops.case import NamedCase


@dataclass(frozen=True)
class HeadsCase(NamedCase):
    """One call of the op."""

    batch: int = 2
    length: int = 37
    heads: int = 2
    kv_heads: int = 2
    dim: int = 8
    size: int = 4
    state: bool = False
    bounds: tuple[int, ...] | None = None
    norm: bool = True
    rope: bool = True
    seen: bool = False
    sliced: bool = False  # x is a part of wider rows


def make_inputs(case: HeadsCase, dtype: torch.dtype, device: str, seed: int) -> dict[str, Any]:
    """Fresh random tensors, by name; gradients that come back among them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    channels = (case.heads + 2 * case.kv_heads) * case.dim
    rows = (case.batch, case.length)
    wide = torch.full((*rows, channels + 16), torch.nan, device=device, dtype=dtype)
    x = wide[..., 8 : 8 + channels] if case.sliced else wide[..., :channels].contiguous()
    x.copy_(normal(*rows, channels))
    sizes = (case.heads, case.kv_heads, case.kv_heads, case.heads, case.kv_heads)
    return {
        "x": x,
        "weight": normal(channels, case.size),
        "q_norm": 1 + 0.5 * normal(case.dim) if case.norm else None,
        "k_norm": 1 + 0.5 * normal(case.dim) if case.norm else None,
        "state": normal(case.batch, case.size - 1, channels) if case.state else None,
        "seen": torch.randint(0, 100, (case.batch,), generator=generator).to(device)
        if case.seen
        else None,
        "grads": [normal(*rows, n, case.dim) for n in sizes],
    }


def exact(case: HeadsCase, given: dict[str, Any]) -> list[Tensor]:
    """The definition: one position after the other sees those before it in its own sequence."""
    x, weight = given["x"], given["weight"]
    past = x.new_zeros(case.batch, case.size - 1, x.shape[2])
    if given["state"] is not None:
        past = given["state"].double()
    padded = torch.cat([past, x], 1)
    bounds = torch.tensor(case.bounds or (0,), device=x.device)
    position = torch.arange(case.length, device=x.device)
    start = bounds[torch.searchsorted(bounds, position, right=True) - 1]
    y = torch.zeros_like(x)
    for lag in range(case.size):
        earlier = padded[:, case.size - 1 - lag : case.size - 1 - lag + case.length]
        inside = (position - start >= lag) if case.bounds else torch.ones_like(position) > 0
        y = y + torch.where(inside[:, None], earlier, 0) * weight[:, lag]
    sizes = [case.heads, case.kv_heads, case.kv_heads]
    q, k, v = F.silu(y).unflatten(-1, (-1, case.dim)).split(sizes, 2)
    if case.norm:
        q, k = (
            h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt() * given[n]
            for h, n in ((q, "q_norm"), (k, "k_norm"))
        )
    if not case.rope:
        return [q, k, v, q, k]
    half = torch.arange(0, case.dim, 2, device=x.device, dtype=torch.float64) / case.dim
    place = (position - start).double().expand(case.batch, -1)
    if given["seen"] is not None:
        place = place + given["seen"][:, None]
    angle = place[..., None, None] * 10000.0**-half
    turned = []
    for h in (q, k):
        a, b = h.chunk(2, -1)
        c, s = angle.cos(), angle.sin()
        turned.append(torch.cat([a * c - b * s, b * c + a * s], -1))
    return [q, k, v, *turned]


def fused(case: HeadsCase, given: dict[str, Any]) -> list[Tensor]:
    """The kernels."""
    from vort.ops.short_convolution import _age
    from vort.ops.short_convolution.triton import Inputs, heads_fused, turn_table

    x = given["x"]
    age = None
    if case.bounds:
        age = _age(torch.tensor([*case.bounds, case.length], device=x.device), case.length)
    cos = sin = None
    if case.rope:
        positions: Any = case.length
        if given["seen"] is not None:
            positions = given["seen"][:, None] + torch.arange(case.length, device=x.device)
        cos, sin = turn_table(positions, case.dim, 10000.0, x.device)
    sizes = (case.heads, case.kv_heads, 1e-6)
    norms = (given["q_norm"], given["k_norm"])
    out = heads_fused(Inputs(x, given["weight"], given["state"], age, *norms, cos, sin, *sizes))
    return [*out[:3], out[0] if out[3] is None else out[3], out[1] if out[4] is None else out[4]]


def outputs_and_gradients(case: HeadsCase, given: dict[str, Any], wide: bool) -> dict[str, Tensor]:
    """Every output and gradient, by name."""
    leaves = {
        name: (x.double() if wide else x).detach().requires_grad_()
        for name, x in given.items()
        if name in ("x", "weight", "q_norm", "k_norm") and x is not None
    }
    outputs = (exact if wide else fused)(case, {**given, **leaves})
    grads = [g.to(y.dtype) for g, y in zip(given["grads"], outputs, strict=True)]
    found = torch.autograd.grad(outputs, list(leaves.values()), grads)
    names = ("q", "k", "v", "turned q", "turned k", *(f"d{name}" for name in leaves))
    return dict(zip(names, (*outputs, *found), strict=True))


def relative_errors(
    case: HeadsCase, dtype: torch.dtype, device: str, seed: int
) -> dict[str, float]:
    """Error of every output and gradient; a second run must give the same bits."""
    given = make_inputs(case, dtype, device, seed)
    got = outputs_and_gradients(case, given, wide=False)
    again = outputs_and_gradients(case, given, wide=False)
    errors = {}
    for name, truth in outputs_and_gradients(case, given, wide=True).items():
        if not torch.equal(got[name], again[name]):
            errors[f"{name} differs between two runs"] = float("nan")
        errors[name] = ((got[name].double() - truth).norm() / truth.norm()).item()
    return errors


def step_errors(case: HeadsCase, dtype: torch.dtype, device: str, seed: int) -> dict[str, float]:
    """Positions one at a time with a state moved on in place, against all at once."""
    from vort.ops.short_convolution.triton import Inputs, heads_step, turn_table

    given = make_inputs(case, dtype, device, seed)
    x, weight = given["x"].contiguous(), given["weight"]
    rest = (given["q_norm"], given["k_norm"])
    sizes = (case.heads, case.kv_heads, 1e-6)
    state = x.new_zeros(case.batch, case.size - 1, x.shape[2])
    parts = []
    for t in range(case.length):
        positions = torch.full((case.batch, 1), t, device=device)
        cos, sin = turn_table(positions, case.dim, 10000.0, x.device)
        one = x[:, t : t + 1]
        parts.append(heads_step(Inputs(one, weight, state, None, *rest, cos, sin, *sizes)))
    whole = exact(case, {n: y.double() if n in ("x", "weight", "q_norm", "k_norm") else y
                         for n, y in given.items()})  # fmt: skip
    names = ("q", "k", "v", "turned q", "turned k")
    found = (torch.cat(steps, 1) for steps in zip(*parts, strict=True))
    errors = {
        name: ((got.double() - y).norm() / y.norm()).item()
        for name, got, y in zip(names, found, whole, strict=True)
    }
    return errors | {"state": (state - x[:, case.length - case.size + 1 :]).double().norm().item()}


CASES = [
    HeadsCase(length=11),
    HeadsCase(batch=1, length=13, heads=4, kv_heads=2, dim=16, bounds=(0, 5, 6)),
    HeadsCase(length=5, heads=3, kv_heads=3, size=3, state=True, rope=False),
    HeadsCase(batch=1, length=9, kv_heads=1, dim=6, size=2, state=True, norm=False, sliced=True),
    HeadsCase(batch=3, length=1, state=True, seen=True),
    HeadsCase(length=4, state=True, seen=True),
    HeadsCase(batch=3, length=1, state=True, seen=True, sliced=True),
]
# For kernels made to walk a few steps at a time.
LONG = [HeadsCase(batch=1, length=35), HeadsCase(batch=1, length=21, heads=1, kv_heads=1, size=3)]
GPU_CASES = [
    *CASES,
    HeadsCase(batch=1, length=140, heads=10, kv_heads=10, sliced=True),
    HeadsCase(length=1031, heads=16, kv_heads=16, dim=64),
    HeadsCase(batch=1, length=3000, heads=8, kv_heads=2, dim=128, bounds=(0, 1000, 1001, 2500)),
]
STEPS = [HeadsCase(length=6), HeadsCase(batch=1, length=4, kv_heads=1, size=2)]
