"""Shapes and options to check, and the relative error of every output and gradient.

The truth is the equation in float64 on the very inputs the kernels get. Errors are
`|x - truth| / |truth|`, NaN never passes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.ops.case import NamedCase, compared, relative


@dataclass(frozen=True)
class HeadsCase(NamedCase):
    """One call of the op."""

    batch: int = 2
    length: int = 37
    heads: int = 2
    kv_heads: int = 2
    dim: int = 8
    size: int = 4  # taps; 1: there is no convolution
    state: bool = False
    bounds: tuple[int, ...] | None = None
    norm: bool = True
    rope: bool = True
    seen: bool = False
    sliced: bool = False  # x is a part of wider rows
    features: int = 0  # logits of learned maps
    absent: tuple[str, ...] = ()  # outputs that nothing is sent back to


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
    kept = 2 * case.features or case.dim
    turned = case.dim if case.rope else kept
    sizes = {
        "q": (case.heads, kept),
        "k": (case.kv_heads, kept),
        "v": (case.kv_heads, case.dim),
        "turned q": (case.heads, turned),
        "turned k": (case.kv_heads, turned),
        "near v": (case.kv_heads, case.dim),
    }
    weight = (case.heads, case.dim, case.features)
    return {
        "x": x,
        "weight": normal(channels, case.size) if case.size > 1 else None,
        "q_norm": 1 + 0.5 * normal(case.dim) if case.norm else None,
        "k_norm": 1 + 0.5 * normal(case.dim) if case.norm else None,
        "state": normal(case.batch, case.size - 1, channels) if case.state else None,
        "seen": torch.randint(0, 100, (case.batch,), generator=generator).to(device)
        if case.seen
        else None,
        "q_map": 0.5 * normal(*weight) if case.features else None,
        "k_map": 0.5 * normal(*weight) if case.features else None,
        "grads": {n: normal(*rows, *size) for n, size in sizes.items() if n not in case.absent},
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
    y = x if weight is None else torch.zeros_like(x)
    for lag in range(0 if weight is None else case.size):
        earlier = padded[:, case.size - 1 - lag : case.size - 1 - lag + case.length]
        inside = (position - start >= lag) if case.bounds else torch.ones_like(position) > 0
        y = y + torch.where(inside[:, None], earlier, 0) * weight[:, lag]
    sizes = [case.heads, case.kv_heads, case.kv_heads]
    y = y if weight is None else F.silu(y)
    q, k, v = y.unflatten(-1, (-1, case.dim)).split(sizes, 2)
    if case.norm:
        q, k = (
            h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt() * given[n]
            for h, n in ((q, "q_norm"), (k, "k_norm"))
        )
    turned: list[Tensor] = []
    if case.rope:
        half = torch.arange(0, case.dim, 2, device=x.device, dtype=torch.float64) / case.dim
        place = (position - start).double().expand(case.batch, -1)
        if given["seen"] is not None:
            place = place + given["seen"][:, None]
        angle = place[..., None, None] * 10000.0**-half
        c, s = angle.cos(), angle.sin()
        halves = [h.chunk(2, -1) for h in (q, k)]
        turned = [torch.cat([a * c - b * s, b * c + a * s], -1) for a, b in halves]
    if case.features:
        q, k = (
            torch.cat([logits.softmax(-1), (-logits).softmax(-1)], -1)
            for logits in (
                torch.einsum("bthd,hdm->bthm", h, given[n]) for h, n in ((q, "q_map"), (k, "k_map"))
            )
        )
    return [q, k, v, *(turned if case.rope else (q, k)), v]


def fused(case: HeadsCase, given: dict[str, Any]) -> list[Tensor]:
    """The kernels."""
    from vort.ops.bounds import ages
    from vort.ops.short_convolution.triton import Inputs, heads_fused, turn_table

    x = given["x"]
    age = None
    if case.bounds:
        age = ages(torch.tensor([*case.bounds, case.length], device=x.device), case.length)
    cos = sin = None
    if case.rope:
        positions: Any = case.length
        if given["seen"] is not None:
            positions = given["seen"][:, None] + torch.arange(case.length, device=x.device)
        cos, sin = turn_table(positions, case.dim, 10000.0, x.device)
    rest = (given["q_norm"], given["k_norm"], cos, sin, given["q_map"], given["k_map"])
    sizes = (case.heads, case.kv_heads, 1e-6, True)
    out = heads_fused(Inputs(x, given["weight"], given["state"], age, *rest, *sizes))
    turned = [plain if y is None else y for y, plain in zip(out[3:5], out, strict=False)]
    return [*out[:3], *turned, out[5]]


WEIGHTS = ("x", "weight", "q_norm", "k_norm", "q_map", "k_map")
NAMES = ("q", "k", "v", "turned q", "turned k", "near v")


def outputs_and_gradients(case: HeadsCase, given: dict[str, Any], wide: bool) -> dict[str, Tensor]:
    """Every output and gradient, by name."""
    leaves = {
        name: (x.double() if wide else x).detach().requires_grad_()
        for name, x in given.items()
        if name in WEIGHTS and x is not None
    }
    outputs = dict(zip(NAMES, (exact if wide else fused)(case, {**given, **leaves}), strict=True))
    grads = {n: g.to(outputs[n].dtype) for n, g in given["grads"].items()}
    found = torch.autograd.grad(
        [outputs[n] for n in grads], list(leaves.values()), list(grads.values()),
        allow_unused=True, materialize_grads=True,
    )  # fmt: skip
    return outputs | dict(zip((f"d{name}" for name in leaves), found, strict=True))


def relative_errors(
    case: HeadsCase, dtype: torch.dtype, device: str, seed: int
) -> dict[str, float]:
    """Error of every output and gradient; a second run must give the same bits."""
    given = make_inputs(case, dtype, device, seed)
    truth = outputs_and_gradients(case, given, wide=True)
    # what has no gradient has none to the bit
    return compared(
        lambda: outputs_and_gradients(case, given, wide=False), truth, device, relative
    )[1]


def step_errors(case: HeadsCase, dtype: torch.dtype, device: str, seed: int) -> dict[str, float]:
    """Positions one at a time with a state moved on in place, against all at once."""
    from vort.ops.short_convolution.triton import Inputs, heads_step, turn_table

    given = make_inputs(case, dtype, device, seed)
    x, weight = given["x"].contiguous(), given["weight"]
    rest = (given["q_norm"], given["k_norm"])
    sizes = (None, None, case.heads, case.kv_heads, 1e-6, False)
    state = x.new_zeros(case.batch, case.size - 1, x.shape[2])
    parts = []
    for t in range(case.length):
        positions = torch.full((case.batch, 1), t, device=device)
        cos, sin = turn_table(positions, case.dim, 10000.0, x.device)
        one = x[:, t : t + 1]
        parts.append(heads_step(Inputs(one, weight, state, None, *rest, cos, sin, *sizes)))
    wide = {n: y.double() if n in WEIGHTS and y is not None else y for n, y in given.items()}
    whole = exact(case, wide)[:5]
    found = (torch.cat(steps, 1) for steps in zip(*parts, strict=True))
    errors = {
        name: ((got.double() - y).norm() / y.norm()).item()
        for name, got, y in zip(NAMES, found, whole, strict=False)
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
    HeadsCase(length=9, heads=3, kv_heads=0, norm=False, rope=False),
    HeadsCase(length=7, features=4),
    HeadsCase(batch=1, length=9, dim=6, features=3, size=3, norm=False, bounds=(0, 2, 7)),
    HeadsCase(length=3, features=8, rope=False, state=True, sliced=True),
    HeadsCase(length=7, size=1, features=4, rope=False, sliced=True),
    HeadsCase(batch=1, length=9, size=1, heads=4, kv_heads=2, bounds=(0, 5, 6)),
    HeadsCase(length=5, size=1, norm=False, features=4, seen=True, absent=("q", "turned k")),
    HeadsCase(length=6, absent=("turned q", "near v", "k")),
    HeadsCase(length=6, features=4, absent=("q", "k", "v")),
    HeadsCase(length=6, features=4, absent=("turned q", "turned k", "near v", "v")),
]
# For kernels made to take a few positions at a time.
LONG = [
    HeadsCase(batch=1, length=70, heads=1, kv_heads=1),
    HeadsCase(batch=3, length=35, heads=1, kv_heads=1, size=3, features=4, state=True),
    HeadsCase(batch=2, length=35, heads=1, kv_heads=1, size=1, features=4, sliced=True),
    HeadsCase(batch=1, length=45, heads=1, kv_heads=1, size=2, features=4, bounds=(0, 14, 15, 31)),
    HeadsCase(batch=1, length=37, heads=1, kv_heads=1, dim=64, features=32),
]
GPU_CASES = [
    *CASES,
    HeadsCase(batch=1, length=140, heads=10, kv_heads=10, sliced=True),
    HeadsCase(length=1031, heads=16, kv_heads=16, dim=64),
    HeadsCase(length=1031, heads=16, kv_heads=16, dim=64, features=32),
    HeadsCase(batch=1, length=3000, heads=8, kv_heads=2, dim=128, bounds=(0, 1000, 1001, 2500)),
    HeadsCase(batch=1, length=700, heads=4, kv_heads=4, dim=128, features=64, state=True),
    HeadsCase(batch=1, length=700, heads=4, kv_heads=4, dim=32, features=64, bounds=(0, 1, 500)),
    HeadsCase(batch=5, length=130, heads=3, kv_heads=3, dim=80, features=40, size=3),
    HeadsCase(batch=3, length=1031, heads=2, kv_heads=2, dim=64, features=32, size=1, rope=False),
    HeadsCase(length=700, heads=8, kv_heads=2, dim=128, size=1),
]
STEPS = [HeadsCase(length=6), HeadsCase(batch=1, length=4, kv_heads=1, size=2)]
