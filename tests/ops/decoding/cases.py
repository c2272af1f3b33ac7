"""Products of few rows, and the two kernels of a step: against the equations in float64.

Every check is a function of (dtype, device, seed) that gives relative errors by name; NaN never
passes. Memory that nothing wrote is NaN where tests run.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.ops.linear.cases import Check, random


def error(x: Tensor, y: Tensor) -> float:
    return ((x.double() - y).norm() / y.norm()).item()


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def _few(rows: int, inner: int, norm: bool = True) -> Check:
    """Several weights, rows of one of them apart; a residual; a gate."""

    def check(dtype: torch.dtype, device: str, seed: int) -> dict[str, float]:
        from vort.ops.linear import Norm
        from vort.ops.linear.few import few_gated, few_products

        normal = random(device, dtype, seed)
        x, scale = normal(rows, 1, inner), 1 + 0.3 * normal(inner)
        # (rows of a weight, numbers between them)
        kinds = ((20, 0), (5, 3), (17, 0), (3, 0), (8, 0), (2, 16), (40, 0), (9, 0))
        weights = [(normal(n, inner + e) / inner**0.5)[:, :inner] for n, e in kinds]
        given: dict[str, Any] = {"norm": Norm(scale, 1e-6)} if norm else {}
        seen = rms(x.double(), scale.double()) if norm else x.double()
        truth = [seen @ w.double().T for w in weights]
        residual = normal(rows, 1, 20)
        up = (normal(20, inner) / inner**0.5).contiguous()
        return {
            "all": error(few_products(x, *weights, **given), torch.cat(truth, -1)),
            "one and a residual": error(
                few_products(x, weights[0], residual=residual, **given),
                truth[0] + residual.double(),
            ),
            "gated": error(
                few_gated(x, weights[0], up, **given),
                F.silu(truth[0]) * (seen @ up.double().T),
            ),
        }

    return check


def _heads(
    heads: int = 4, kv_heads: int = 2, dim: int = 16, size: int = 4, window: int = 5,
    norm: bool = True, rope: float | None = 1e4, features: int = 6, batch: int = 3,
) -> Check:  # fmt: skip
    """A token's heads from random states, one row at its start, one far on; states after it."""

    def check(dtype: torch.dtype, device: str, seed: int) -> dict[str, float]:
        from vort.ops.decoding.heads import HeadsInputs, heads_step

        normal = random(device, dtype, seed)
        channels = (heads + 2 * kv_heads) * dim
        x = torch.cat([normal(batch, channels), normal(batch, 8)], -1)[:, :channels]
        maps = [normal(heads, dim, features) / dim**0.5 for _ in range(2)]
        conv = normal(batch, size - 1, channels) if size else None
        taps = normal(channels, size) if size else None
        norms = [1 + 0.3 * normal(dim) if norm else None for _ in range(2)]
        seen = torch.tensor([0, 2, 1_000_003] * batch, device=device)[:batch] if window else None
        rings: list[Any] = [None, None]
        if seen is not None:
            written = torch.arange(window, device=device) < seen[:, None]
            rings = [normal(batch, window, kv_heads, dim) * written[..., None, None] for _ in "kv"]
        before = [None if t is None else t.double().clone() for t in (conv, *rings)]
        found = heads_step(
            HeadsInputs(x, *maps, kv_heads, conv, taps, *norms, *rings, seen, rope, 1e-6)
        )
        y, wide = x.double(), None
        if conv is not None and taps is not None:
            wide = torch.cat([before[0], y[:, None]], 1)  # type: ignore[list-item]
            y = F.silu((wide * taps.double().T.flip(0)).sum(1))
        q, k, v = y.unflatten(-1, (-1, dim)).split([heads, kv_heads, kv_heads], 1)
        if norm:
            q, k = (rms(h, n.double()) for h, n in zip((q, k), norms, strict=True))  # type: ignore[union-attr]
        group = heads // kv_heads
        k_all = k.repeat_interleave(group, 1)
        logits = [
            torch.einsum("bhd,hdm->bhm", h, m.double())
            for h, m in zip((q, k_all), maps, strict=True)
        ]
        wanted = [torch.cat([x.softmax(-1), (-x).softmax(-1)], -1) for x in logits]
        errors = {
            "features of q": error(found.q, wanted[0]),
            "features of k": error(found.k, wanted[1]),
            "v": error(found.v, v),
        }
        if conv is not None and wide is not None:
            errors["convolution's state"] = error(conv, wide[:, 1:])
        if seen is None:
            return errors
        if rope is not None:
            half = torch.arange(0, dim, 2, device=device, dtype=torch.float64) / dim
            angle = seen.double()[:, None, None] * rope**-half
            turned = []
            for h in (q, k):
                a, b = h.chunk(2, -1)
                c, s = angle.cos(), angle.sin()
                turned.append(torch.cat([a * c - b * s, b * c + a * s], -1))
            q, k = turned
        here = torch.arange(window, device=device) == (seen % window)[:, None]
        keys, values = (
            torch.where(here[..., None, None], new[:, None], ring)
            for new, ring in zip((k, v), before[1:], strict=True)
        )
        scores = torch.einsum("bhd,bwhd->bhw", q, keys.repeat_interleave(group, 2)) * dim**-0.5
        p = scores.masked_fill(~(written | here)[:, None], -torch.inf).softmax(-1)
        local = torch.einsum("bhw,bwhd->bhd", p, values.repeat_interleave(group, 2))
        assert found.local is not None
        assert found.entropy is not None
        assert found.place is not None
        return errors | {
            "place": (found.place - seen).double().norm().item(),
            "local": error(found.local, local),
            "entropy": error(found.entropy + 1, 1 - torch.xlogy(p, p).sum(-1)),
            "ring of keys": error(rings[0], keys),
            "ring of values": error(rings[1], values),
        }

    return check


def _memory(
    heads: int = 4, kv_heads: int = 2, dim: int = 16, features: int = 12, scales: int = 3,
    normalizer: str = "decayed", include_self: bool = True, write: bool = True, read: bool = True,
    local: bool = True, gate: bool = True, norm: bool = True, batch: int = 2,
    narrow: bool = False, gains: int = 0,
) -> Check:  # fmt: skip
    """A token in random states, and the states after it."""

    def check(dtype: torch.dtype, device: str, seed: int) -> dict[str, float]:
        from vort.fractional import PowerLawBasis
        from vort.ops.decoding.heads import HeadsOutputs
        from vort.ops.decoding.memory import StepInputs, memory_step

        normal = random(device, dtype, seed)
        basis = PowerLawBasis.fit(1000, scales)
        width = heads * (1 + write + (scales if read else 0) + gains)
        joined = normal(batch, heads * dim + width)
        logits, gates = joined[:, heads * dim :], joined[:, : heads * dim] if gate else None
        q, k = (normal(batch, heads, features).abs() for _ in range(2))
        v = normal(batch, kv_heads, dim)
        biases = [normal(heads), normal(heads), normal(heads * scales), 9 * normal(heads * gains)]
        biases = [
            b if there else None
            for b, there in zip(biases, (True, write, read, gains), strict=True)
        ]  # type: ignore[misc]
        mix = normal(heads, heads + 5)[:, 5:]
        seen = torch.arange(batch, device=device) if local else None
        near = normal(batch, heads, dim) if local else None
        entropy = normal(batch, heads).float().abs() if local else None
        G = random(device, torch.float32, seed + 1)(batch, heads, scales, features, dim)
        G = G.to(torch.bfloat16) if narrow else G
        sums = {"decayed": scales, "undecayed": 1, "none": 0}[normalizer]
        b = random(device, torch.float32, seed + 2)(batch, heads, sums, features).abs()
        weight = 1 + 0.3 * normal(dim) if norm else None
        before, sums_before = G.double().clone(), b.double().clone()
        log_decay = basis.log_decay.float().to(device)
        polynomials = basis.polynomials_on(torch.device(device), torch.float32)
        out = memory_step(
            HeadsOutputs(q, k, v, near, entropy, None if seen is None else seen.clone()),
            StepInputs(
                G, b if sums else None, logits, *biases, mix, polynomials, log_decay, 0.05,
                normalizer, include_self, 1e-6, gates, weight, 1e-6, seen,
            ),
        )  # fmt: skip
        x = logits.double()
        lo = x[:, :heads] + biases[0].double()
        if entropy is not None:
            lo = lo + entropy.double() @ mix.double().T
        w = basis.weights(0.05 + 0.95 * torch.sigmoid(lo), validate=False)
        if write:
            w = w * torch.sigmoid(x[:, heads : 2 * heads] + biases[1].double())[..., None]
        if gains:
            log = x[:, -heads * gains :] + biases[3].double()
            w = w * log.unflatten(-1, (heads, gains)).clamp(-15, 15).exp()
        r = torch.ones_like(w)
        if read:
            rest = x[:, heads * (1 + write) : heads * (1 + write + scales)] + biases[2].double()
            r = rest.unflatten(-1, (heads, scales)).softmax(-1) * scales
        kept = log_decay.double().exp()
        wide_q, wide_k = q.double(), k.double()
        values = v.double().repeat_interleave(heads // kv_heads, 1)
        old = before * kept[:, None, None]
        new = old + torch.einsum("bhs,bhk,bhv->bhskv", w, wide_k, values)
        y = torch.einsum("bhs,bhk,bhskv->bhv", r, wide_q, new if include_self else old)
        after = sums_before
        if normalizer == "decayed":
            aged = sums_before * kept[:, None]
            after = aged + torch.einsum("bhs,bhk->bhsk", w, wide_k)
            den = torch.einsum("bhs,bhk,bhsk->bh", r, wide_q, after if include_self else aged)
        elif normalizer == "undecayed":
            after = sums_before + wide_k[:, :, None]
            den = torch.einsum("bhk,bhsk->bh", wide_q, after if include_self else sums_before)
        if normalizer != "none":
            y = y / (den.abs() + 1e-6)[..., None]
        y = y if near is None else y + near.double()
        y = y if weight is None else rms(y, weight.double())
        y = y.flatten(1)
        y = y if gates is None else y * F.silu(gates.double())
        errors = {"output": error(out, y), "G": error(G, new)}
        if sums:
            errors["b"] = error(b, after)
        if seen is not None:
            counts = torch.arange(1, batch + 1, device=device)
            errors["seen"] = (seen - counts).double().norm().item()
        return errors

    return check


def _aged(G: Tensor, log_decay: Tensor, dtype: torch.dtype, seed: int, steps: int) -> Tensor:
    """States `[1, 1, 2, D, D]` after steps that write next to nothing, float64."""
    from vort.fractional import PowerLawBasis
    from vort.ops.decoding.heads import HeadsOutputs
    from vort.ops.decoding.memory import StepInputs, memory_step

    device, dim, G = G.device, G.shape[-1], G.clone()
    q, k = (torch.full((1, 1, dim), x, device=device, dtype=dtype) for x in (1.0, 0.0))
    v = torch.ones(1, 1, dim, device=device, dtype=dtype)
    logits = torch.zeros(1, 1, device=device, dtype=dtype)
    seen = torch.full((1,), seed % 1000, device=device)
    polynomials = PowerLawBasis.fit(1000, 2).polynomials_on(device, torch.float32)
    for _ in range(steps):
        memory_step(
            HeadsOutputs(q, k, v, v, None, seen.clone()),
            StepInputs(
                G, None, logits, logits[0], *[None] * 4, polynomials, log_decay, 0.05, "none",
                True, 1e-6, None, None, 1e-6, seen,
            ),
        )  # fmt: skip
    return G.double()


def bfloat16_states_forget(dtype: torch.dtype, device: str, seed: int) -> dict[str, float]:
    """What a slow scale has lost after many steps that write next to nothing: right on average.

    Rounded to the nearest it would have lost nothing at all.
    """
    steps, dim = 12, 32
    G = torch.full((1, 1, 2, dim, dim), 1.37, device=device, dtype=torch.bfloat16)
    log_decay = torch.tensor([-1e-3, -2e-3], device=device)
    lost = (G.double() - _aged(G, log_decay, dtype, seed, steps)).mean((-1, -2))
    wanted = G.double().mean((-1, -2)) * (1 - (steps * log_decay.double()).exp())
    # A thousand numbers lose a step or two each: a tenth of it is chance.
    return {"loss": 0.0 if error(lost, wanted) < 0.1 else 1.0}


def fast_scales_keep_digits(dtype: torch.dtype, device: str, seed: int) -> dict[str, float]:
    """What a step that writes nothing leaves of a scale that forgets nearly all."""
    G = torch.ones(1, 1, 2, 8, 8, device=device)
    log_decay = torch.tensor([-3.0, -17.0], device=device)
    left = _aged(G, log_decay, dtype, seed, 1) / log_decay.double().exp()[:, None, None]
    return {"share": error(left, G.double())}


CHECKS: dict[str, Check] = {
    "few rows: one": _few(1, 50),
    "few rows: one, unnormed": _few(1, 200, norm=False),
    "few rows: three": _few(3, 50),
    "few rows: seventeen": _few(17, 70),
    "step of heads": _heads(),
    "step of heads without groups": _heads(kv_heads=4, dim=6, features=8),
    "step of heads without convolution": _heads(size=0, rope=None),
    "step of heads with a short convolution": _heads(size=2, norm=False),
    "step of heads without attention": _heads(window=0),
    "step of memory": _memory(),
    "step of memory with undecayed sums": _memory(normalizer="undecayed", include_self=False),
    "step of memory unnormalised": _memory(normalizer="none", scales=1, read=False, kv_heads=4),
    "step of memory without itself": _memory(include_self=False, write=False, norm=False),
    "step of memory alone": _memory(local=False, gate=False),
    "step of memory with a gain": _memory(gains=1, write=False),
    "step of memory with gains": _memory(gains=3, read=False),
    "step of memory, states in two parts": _memory(2, 1, 64, 64, 12, batch=1),
    "bfloat16 states forget": bfloat16_states_forget,
    "step of memory, fast scales": fast_scales_keep_digits,
}
# Sizes that only a GPU is quick enough for.
GPU_CHECKS: dict[str, Check] = CHECKS | {
    "few rows: one, wide": _few(1, 2816),
    "few rows: sixteen, wide": _few(16, 1024),
    "few rows: sixty, wide": _few(60, 2816),
    "step of heads, wide": _heads(16, 16, 64, window=128, features=32, batch=16),
    "step of heads, long window": _heads(8, 2, 128, window=300, features=64),
    "step of memory, wide": _memory(16, 16, 64, 64, 8, batch=16),
    "step of memory, nineteen scales": _memory(4, 1, 128, 128, 19),
    "step of memory, free writes": _memory(16, 16, 64, 64, 8, batch=16, gains=8),
    "step of memory, bfloat16 states": _memory(16, 16, 64, 64, 8, narrow=True),
}
