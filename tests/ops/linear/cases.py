"""Products with their neighbours, the norm of a residual, routing weights and a local step: the
kernels' outputs and gradients against the equations in float64.

Every check is a function of (dtype, device, seed) that gives relative errors by name; NaN never
passes. Memory that nothing wrote is NaN where tests run.
"""

from collections.abc import Callable
from functools import partial
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

    # Programs of the interpreter run one after another, always alike: a second run says nothing.
    got, truth = run(fused, False), run(exact, True)
    on_cpu = all(x.device.type == "cpu" for x in got.values())
    again = got if on_cpu else run(fused, False)
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


# As under autocast: what products are taken in, and the type of sums and weights beside it.
WIDER = {torch.bfloat16: torch.float32, torch.float32: torch.float64}


def _norm(x: Tensor, weight: Any) -> Tensor:
    return x if weight is None else x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def _mlp(delta: bool, norm: bool, wide: bool = False) -> Check:
    def check(dtype: torch.dtype, device: str, seed: int) -> dict[str, float]:
        from vort.ops.linear.triton import gated_mlp_fused

        normal = random(device, WIDER[dtype] if wide else dtype, seed)
        inputs = {
            "x": normal(3, 7, 24),
            "delta": normal(3, 7, 24).to(dtype) if delta else None,
            "norm": 1 + 0.3 * normal(24) if norm else None,
            "gate": normal(50, 24) / 5,
            "up": normal(50, 24) / 5,
            "down": normal(24, 50) / 7,
        }

        def exact(
            x: Tensor, delta: Any, norm: Any, gate: Tensor, up: Tensor, down: Tensor
        ) -> tuple[Tensor, Tensor]:
            total = x * 1 if delta is None else x + delta
            n = _norm(total, norm)
            return total, (F.silu(n @ gate.T) * (n @ up.T)) @ down.T

        def fused(
            x: Tensor, delta: Any, norm: Any, gate: Tensor, up: Tensor, down: Tensor
        ) -> tuple[Tensor, Tensor]:
            return gated_mlp_fused(x, gate, up, down, delta, norm, 1e-6, dtype)

        return compare(fused, exact, inputs)

    return check


def _products(
    delta: bool, norm: bool, groups: tuple[int, ...], width: int = 32, wide: bool = False
) -> Check:
    def check(dtype: torch.dtype, device: str, seed: int) -> dict[str, float]:
        from vort.ops.linear.triton import products_fused

        normal = random(device, WIDER[dtype] if wide else dtype, seed)
        names = [f"w{i}" for i in range(sum(groups))]
        inputs: dict[str, Tensor | None] = {
            "x": normal(3, 7, width),
            "delta": normal(3, 7, width).to(dtype) if delta else None,
            "norm": 1 + 0.3 * normal(width) if norm else None,
            **{name: normal(5 + 3 * i, width) / 6 for i, name in enumerate(names)},
        }

        def grouped(weights: dict[str, Tensor]) -> list[list[Tensor]]:
            left = iter(weights.values())
            return [[next(left) for _ in range(size)] for size in groups]

        def exact(x: Tensor, delta: Any, norm: Any, **weights: Tensor) -> tuple[Tensor, ...]:
            total = x * 1 if delta is None else x + delta
            n = _norm(total, norm)
            return total, n * 1, *(n @ torch.cat(w).T for w in grouped(weights))

        def fused(x: Tensor, delta: Any, norm: Any, **weights: Tensor) -> tuple[Tensor, ...]:
            return products_fused(x, grouped(weights), delta, norm, 1e-6, dtype)

        return compare(fused, exact, inputs)

    return check


def _gated_norm(other: bool, gate: bool, norm: bool, wide: bool = False) -> Check:
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
        if wide:
            for name in ("norm", "weight"):
                given = inputs[name]
                inputs[name] = None if given is None else given.to(WIDER[dtype])

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


def cross_entropy(
    dtype: torch.dtype, device: str, seed: int, wide: bool = False
) -> dict[str, float]:
    from vort.ops.linear import triton

    normal = random(device, WIDER[dtype] if wide else dtype, seed)
    errors = {}
    # odd ones, of which one takes two turns, and one of whole runs of eight
    for size in (33,) if wide else (33, 5000, 8195):
        targets = torch.randint(0, size, (300,), generator=torch.Generator().manual_seed(seed))
        targets[::7] = -100
        targets = targets.to(device)
        held, triton.LOGITS = triton.LOGITS, 256 * size  # two parts

        def exact(x: Tensor, weight: Tensor, targets: Tensor = targets) -> Tensor:
            return F.cross_entropy(x @ weight.T, targets, reduction="sum")

        def fused(x: Tensor, weight: Tensor, targets: Tensor = targets) -> Tensor:
            return triton.cross_entropy_fused(x, weight, targets, -100)

        inputs = {"x": normal(300, 20).to(dtype), "weight": normal(size, 20) / 4}
        found = compare(fused, exact, inputs)
        triton.LOGITS = held
        errors |= {f"{name} of {size}": e for name, e in found.items()}
    return errors


def _routing(heads: int, gate: bool, read: bool, more: int, gains: int = 0) -> Check:
    def check(dtype: torch.dtype, device: str, seed: int) -> dict[str, float]:
        from vort.fractional import PowerLawBasis
        from vort.ops.order_weights.triton import RoutingInputs, routing_weights_fused

        basis = PowerLawBasis.fit(1000, 8)
        normal = random(device, dtype, seed)
        inputs: dict[str, Tensor | None] = {
            "logits": normal(2, 41, heads * (1 + gate + (8 if read else 0) + gains)),
            "order_bias": normal(heads),
            "write_bias": normal(heads) if gate else None,
            "read_bias": normal(heads * 8) if read else None,
            # some far out: a gain is cut off at e^15
            "gain_bias": 9 * normal(heads * gains) if gains else None,
            "more": normal(2, 41, more) if more else None,
            "more_weight": normal(heads, more) / 2 if more else None,
        }

        def exact(
            logits: Tensor, order_bias: Tensor, write_bias: Any, read_bias: Any, gain_bias: Any,
            more: Any, more_weight: Any,
        ) -> tuple[Tensor | None, ...]:  # fmt: skip
            logit = logits[..., :heads] + order_bias
            logit = logit if more is None else logit + more @ more_weight.T
            order = 0.05 + 0.95 * torch.sigmoid(logit)
            write = basis.weights(order, validate=False)
            if gate:
                write = (
                    write * torch.sigmoid(logits[..., heads : 2 * heads] + write_bias)[..., None]
                )
            if gains:
                log = (logits[..., -heads * gains :] + gain_bias).unflatten(-1, (heads, gains))
                write = write * log.clamp(-15, 15).exp()
            if not read:
                return order, write, None
            rest = logits[..., heads * (1 + gate) : heads * (9 + gate)] + read_bias
            return order, write, rest.unflatten(-1, (heads, 8)).softmax(-1) * 8

        def fused(**given: Any) -> tuple[Tensor | None, ...]:
            polynomials = basis.polynomials_on(given["logits"].device, torch.float32)
            return routing_weights_fused(RoutingInputs(*given.values(), polynomials, 0.05))

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
    "gated_mlp": _mlp(True, True),
    "gated_mlp without delta": _mlp(False, True),
    "gated_mlp alone": _mlp(False, False),
    "products": _products(True, True, (3, 1, 2)),
    "products of 1024": _products(False, True, (1,), 1024),
    "products without norm": _products(False, False, (2, 1)),
    "sum and norm": _products(True, True, ()),
    "gated_norm_linear": _gated_norm(True, True, True),
    "gated_norm_linear without other": _gated_norm(False, True, True),
    "gated_norm_linear without gate": _gated_norm(True, False, True),
    "gated_norm_linear without norm": _gated_norm(True, True, False),
    "gated_norm_linear alone": _gated_norm(False, False, False),
    "cross_entropy": cross_entropy,
    "gated_mlp under autocast": _mlp(True, True, wide=True),
    "products under autocast": _products(True, True, (3, 1, 2), wide=True),
    "gated_norm_linear under autocast": _gated_norm(True, True, True, wide=True),
    "cross_entropy under autocast": partial(cross_entropy, wide=True),
    "routing": _routing(3, True, True, 4),
    "routing without more": _routing(2, True, True, 0),
    "routing of 13 heads": _routing(13, True, True, 20),
    "routing of much more": _routing(3, True, False, 40),
    "routing without gate": _routing(4, False, True, 4),
    "routing without read": _routing(2, True, False, 1),
    "routing with a gain": _routing(3, True, True, 4, gains=1),
    "routing with gains": _routing(2, True, True, 0, gains=8),
    "routing with gains alone": _routing(3, False, False, 0, gains=8),
    "local step": local_step,
}
