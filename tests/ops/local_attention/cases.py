"""Inputs for local attention: drawn by hypothesis, or built from a seed."""

from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor


@dataclass
class Case:
    q: Tensor
    k: Tensor
    v: Tensor
    window: int
    options: dict[str, Any] = field(default_factory=dict)

    def leaves(self) -> list[Tensor]:
        return [x.detach().clone().requires_grad_() for x in (self.q, self.k, self.v)]


def make(
    batch: int = 1,
    length: int = 20,
    heads: int = 2,
    kv_heads: int | None = None,
    dim: int = 4,
    value_dim: int = 3,
    window: int = 5,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    spread: float = 1.0,
    **options: Any,
) -> Case:
    kv_heads = heads if kv_heads is None else kv_heads
    generator = torch.Generator().manual_seed(seed)
    sizes = ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
    q, k, v = (
        (spread * torch.randn(batch, length, *size, generator=generator, dtype=torch.float64))
        for size in sizes
    )
    return Case(q.to(dtype), k.to(dtype), v.to(dtype), window, options)


@st.composite
def cases(draw: st.DrawFn, max_length: int = 150) -> Case:
    length = draw(st.one_of(st.integers(0, 12), st.integers(0, max_length)))
    window = draw(st.one_of(st.integers(1, 8), st.integers(1, max_length + 20)))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    options: dict[str, Any] = {}
    kind = draw(st.sampled_from(["plain", "padding", "packed", "both"]))
    batch = draw(st.integers(1, 3)) if kind in ("plain", "padding") else 1
    if kind in ("padding", "both"):
        seed = draw(st.integers(0, 2**20))
        keep = draw(st.sampled_from([0.0, 0.3, 0.9]))
        random = torch.rand(batch, length, generator=torch.Generator().manual_seed(seed))
        options["padding_mask"] = random < keep
    if kind in ("packed", "both"):
        inner = draw(st.lists(st.integers(0, length), max_size=6))
        options["cu_seqlens"] = torch.tensor([0, *sorted(inner), length], dtype=torch.int32)
    if draw(st.booleans()):
        options["rope_base"] = draw(st.sampled_from([100.0, 10000.0]))
    if draw(st.booleans()):
        options["scale"] = draw(st.floats(-1, 2))
    return make(
        batch,
        length,
        kv_heads * group,
        kv_heads,
        dim=2 * draw(st.integers(1, 4)),
        value_dim=draw(st.integers(1, 7)),
        window=window,
        seed=draw(st.integers(0, 2**20)),
        spread=draw(st.sampled_from([0.1, 1.0, 4.0])),
        **options,
    )
