"""Products with their neighbours, the norm of a residual, routing weights and a local step: the
kernels' outputs and gradients against the equations in float64.

Every check is a function of (dtype, device, seed) that gives relative errors by name; NaN never
passes. Memory that nothing wrote is NaN where tests run.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Check = Callable[[torch.dtype, str, int], dict[str, float]]


def compare(
    fused: Callable[..., Any], exact: Callable[..., Any], inputs: dict[str, Tensor | None]
) -> dict[str, float]:
    """Errors of outputs and gradients of two functions of the same tensors; equal bits twice."""

    def run(function: Callable[..., Any], wide: bool) -> dict[str, Tensor]:
        leaves = {
            name: (x.double() if wide else x).detach().requires_grad_()
            for name, x in inputs.items()
            if x is not None
        }
        found = function(**(inputs | leaves))
        outputs = [y for y in (found if isinstance(found, tuple) else (found,)) if y is not None]
        generator = torch.Generator().manual_seed(7)
        grads = [torch.randn(y.shape, generator=generator).to(y.device, y.dtype) for y in outputs]
        gradients = torch.autograd.grad(outputs, list(leaves.values()), grads, allow_unused=True)
        named = {f"output {i}": y for i, y in enumerate(outputs)}
        return named | {f"d{n}": g for n, g in zip(leaves, gradients, strict=True) if g is not None}

    got, again, truth = run(fused, False), run(fused, False), run(exact, True)
    assert got.keys() == truth.keys(), (got.keys(), truth.keys())
    errors = {}
    for name, wanted in truth.items():
        same = torch.equal(got[name], again[name])
        wrong = (got[name].double() - wanted).norm() / wanted.norm()
        errors[name] = wrong.item() if same else float("nan")
    return errors


def random(device: str, dtype: torch.dtype, seed: int) -> Callable[..., Tensor]:
    """A source of normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator).to(device, dtype)


def gated_linear(dtype: torch.dtype, device: str, seed: int) -> dict[str, float]:
    from vort.ops.linear.triton import gated_linear_fused

    normal = random(device, dtype, seed)
    inputs = {"both": normal(3, 7, 2 * 50), "weight": normal(20, 50) / 7}

    def exact(both: Tensor, weight: Tensor) -> Tensor:
        a, b = both.chunk(2, -1)
        return (F.silu(a) * b) @ weight.T

    return compare(gated_linear_fused, exact, inputs)  # type: ignore[arg-type]


def products(dtype: torch.dtype, device: str, seed: int) -> dict[str, float]:
    from vort.ops.linear.triton import products_fused

    normal = random(device, dtype, seed)
    inputs = {"x": normal(3, 7, 32), "first": normal(20, 32) / 6, "second": normal(9, 32) / 6}

    def exact(x: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        return x * 1, x @ first.T, x @ second.T

    def fused(x: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        return products_fused(x, first, second)

    return compare(fused, exact, inputs)  # type: ignore[arg-type]


def _gated_norm(other: bool, gate: bool, norm: bool) -> Check:
    def check(dtype: torch.dtype, device: str, seed: int) -> dict[str, float]:
        from vort.ops.linear.triton import gated_norm_linear_fused

        normal = random(device, dtype, seed)
        inputs: dict[str, Tensor | None] = {
            "x": normal(2, 9, 3, 20),
            "other": normal(2, 9, 3, 20) if other else None,
            "gate": normal(2, 9, 60) if gate else None,
            "norm": 1 + 0.3 * normal(20) if norm else None,
            "weight": normal(13, 60) / 8,
        }

        def exact(x: Tensor, other: Any, gate: Any, norm: Any, weight: Tensor) -> Tensor:
            y = x if other is None else x + other
            if norm is not None:
                y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm
            y = y.flatten(2)
            return (y if gate is None else y * F.silu(gate)) @ weight.T

        def fused(x: Tensor, other: Any, gate: Any, norm: Any, weight: Tensor) -> Tensor:
            wide = None
            if gate is not None:  # as a part of wider rows
                wide = torch.cat([torch.full_like(gate, torch.nan), gate], -1)[..., 60:]
            return gated_norm_linear_fused(x, other, wide, norm, weight, 1e-6)

        return compare(fused, exact, inputs)

    return check


def add_rms_norm(dtype: torch.dtype, device: str, seed: int) -> dict[str, float]:
    from vort.ops.rms_norm.triton import add_rms_norm_fused

    normal = random(device, dtype, seed)
    errors = {}
    for dim in (50, 1024):
        weight = 1 + 0.3 * normal(dim)
        inputs = {"x": normal(3, 7, dim), "delta": normal(3, 7, dim), "weight": weight}

        def exact(x: Tensor, delta: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            total = x + delta
            return total, total / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

        def fused(x: Tensor, delta: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            return add_rms_norm_fused(x, delta, weight, 1e-6)

        found = compare(fused, exact, inputs)  # type: ignore[arg-type]
        errors |= {f"{name}, {dim} wide": e for name, e in found.items()}
    return errors


def cross_entropy(dtype: torch.dtype, device: str, seed: int) -> dict[str, float]:
    from vort.ops.linear import triton

    normal = random(device, dtype, seed)
    errors = {}
    for size in (33, 5000):
        targets = torch.randint(0, size, (300,), generator=torch.Generator().manual_seed(seed))
        targets[::7] = -100
        targets = targets.to(device)
        held, triton.LOGITS = triton.LOGITS, 256 * size  # two parts

        def exact(x: Tensor, weight: Tensor, targets: Tensor = targets) -> Tensor:
            return F.cross_entropy(x @ weight.T, targets, reduction="sum")

        def fused(x: Tensor, weight: Tensor, targets: Tensor = targets) -> Tensor:
            return triton.cross_entropy_fused(x, weight, targets, -100)

        found = compare(fused, exact, {"x": normal(300, 20), "weight": normal(size, 20) / 4})
        triton.LOGITS = held
        errors |= {f"{name} of {size}": e for name, e in found.items()}
    return errors


def _routing(heads: int, gate: bool, read: bool, extra: bool) -> Check:
    def check(dtype: torch.dtype, device: str, seed: int) -> dict[str, float]:
        from vort.fractional import PowerLawBasis
        from vort.ops.order_weights.triton import RoutingInputs, routing_weights_fused

        basis = PowerLawBasis.fit(1000, 8)
        normal = random(device, dtype, seed)
        width = heads * (1 + gate + (8 if read else 0))
        inputs: dict[str, Tensor | None] = {
            "logits": normal(2, 41, width),
            "bias": normal(width),
            "extra": normal(2, 41, heads) if extra else None,
        }

        def exact(logits: Tensor, bias: Tensor, extra: Any) -> tuple[Tensor | None, ...]:
            x = logits + bias
            logit = x[..., :heads] + (0 if extra is None else extra)
            order = 0.05 + 0.95 * torch.sigmoid(logit)
            write = basis.weights(order, validate=False)
            if gate:
                write = write * torch.sigmoid(x[..., heads : 2 * heads])[..., None]
            if not read:
                return order, write, None
            rest = x[..., heads * (1 + gate) :].unflatten(-1, (heads, 8))
            return order, write, rest.softmax(-1) * 8

        def fused(logits: Tensor, bias: Tensor, extra: Any) -> tuple[Tensor | None, ...]:
            polynomials = basis.polynomials_on(logits.device, torch.float32)
            options = (heads, 0.05, gate, read)
            return routing_weights_fused(RoutingInputs(logits, bias, extra, polynomials, *options))

        return compare(fused, exact, inputs)

    return check


def local_step(dtype: torch.dtype, device: str, seed: int) -> dict[str, float]:
    """Tokens one at a time into a ring, against attention in float64 over the last of them."""
    from vort.ops.local_attention.triton.step import attend_step

    normal = random(device, dtype, seed)
    batch, heads, kv_heads, dim, window, length = 2, 4, 2, 16, 5, 9
    q, k, v = (normal(batch, length, n, dim) for n in (heads, kv_heads, kv_heads))
    rings = [torch.zeros(batch, window, kv_heads, dim, device=device, dtype=dtype) for _ in "kv"]
    seen = torch.zeros(batch, dtype=torch.int64, device=device)
    outputs, entropies = [], []
    for t in range(length):
        part = slice(t, t + 1)
        o, entropy = attend_step(q[:, part], k[:, part], v[:, part], *rings, seen, 0.25)
        outputs.append(o)
        entropies.append(entropy)
    wide = [x.double().repeat_interleave(heads // x.shape[2], 2) for x in (q, k, v)]
    scores = torch.einsum("bthd,bshd->bhts", *wide[:2]) * 0.25
    t = torch.arange(length, device=device)
    seen_by = (t[None, :] <= t[:, None]) & (t[None, :] > t[:, None] - window)
    p = scores.masked_fill(~seen_by, -torch.inf).softmax(-1)
    truth = torch.einsum("bhts,bshd->bthd", p, wide[2])
    entropy = -torch.xlogy(p, p).sum(-1).transpose(1, 2)

    def error(x: Tensor, y: Tensor) -> float:
        return ((x.double() - y).norm() / y.norm()).item()

    assert seen.tolist() == [length] * batch
    return {
        "o": error(torch.cat(outputs, 1), truth),
        "entropy": error(torch.cat(entropies, 1), entropy),
    }


CHECKS: dict[str, Check] = {
    "gated_linear": gated_linear,
    "products": products,
    "gated_norm_linear": _gated_norm(True, True, True),
    "gated_norm_linear without other": _gated_norm(False, True, True),
    "gated_norm_linear without gate": _gated_norm(True, False, True),
    "gated_norm_linear without norm": _gated_norm(True, True, False),
    "gated_norm_linear alone": _gated_norm(False, False, False),
    "add_rms_norm": add_rms_norm,
    "cross_entropy": cross_entropy,
    "routing": _routing(3, True, True, True),
    "routing without extra": _routing(2, True, True, False),
    "routing without gate": _routing(4, False, True, True),
    "routing without read": _routing(2, True, False, True),
    "local step": local_step,
}
