"""Shapes and options to check, and the relative error of every output and gradient.

The truth is `local_attention_exact` in float64 on the very inputs the kernels get (rounded to
bfloat16 first where they are bfloat16). Errors are `|x - truth| / |truth|`, NaN never passes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.ops.case import NamedCase, compared, difference_if_compiled, relative_or_of_ones
from vort.ops.local_attention import local_attention, local_attention_exact
from vort.ops.local_attention.attention import attend


@dataclass(frozen=True)
class LocalCase(NamedCase):
    """One call of the op; `lengths` are packed sequences and replace batch and length."""

    batch: int = 1
    length: int = 77
    heads: int = 2
    kv_heads: int = 1
    dim: int = 16
    value_dim: int = 16
    window: int = 20
    prefix: int = 0
    lengths: tuple[int, ...] = ()
    real: float = 1.0  # share of positions that are not padding
    entropy: bool = True
    rope_base: float | None = None
    spread: float = 1.0
    scale: float | None = None

    @property
    def tokens(self) -> tuple[int, int]:
        """Batch and length."""
        return (1, sum(self.lengths)) if self.lengths else (self.batch, self.length)


def make_inputs(case: LocalCase, dtype: torch.dtype, device: str, seed: int) -> dict[str, Tensor]:
    """Fresh random tensors, and the gradients that come back to output and entropy."""
    generator = torch.Generator().manual_seed(seed)
    batch, length = case.tokens
    keys = length + case.prefix

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    tensors = {
        "q": (case.spread * normal(batch, length, case.heads, case.dim)).to(dtype),
        "k": normal(batch, keys, case.kv_heads, case.dim).to(dtype),
        "v": normal(batch, keys, case.kv_heads, case.value_dim).to(dtype),
        "do": normal(batch, length, case.heads, case.value_dim).to(dtype),
        "dentropy": normal(batch, length, case.heads),
    }
    if case.real < 1:
        tensors["padding_mask"] = torch.rand(batch, length, generator=generator) < case.real
    return {name: x.to(device) for name, x in tensors.items()}


def fused(case: LocalCase, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Any:
    """The kernels: through the public form, or beneath it where keys have a prefix."""
    if case.prefix:
        return attend(
            q, k, v, case.window, scale=case.dim**-0.5, return_entropy=case.entropy,
            backend="triton",
        )  # fmt: skip
    return local_attention(
        q, k, v, case.window, return_entropy=case.entropy, backend="triton", **options
    )


def exact(case: LocalCase, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Any:
    """The definition: queries of the prefix are made up, and what they get is dropped."""
    before = q.new_zeros(q.shape[0], case.prefix, *q.shape[2:])
    o, entropy = local_attention_exact(
        torch.cat([before, q], 1), k, v, case.window, return_entropy=case.entropy, **options
    )
    return o[:, case.prefix :], None if entropy is None else entropy[:, case.prefix :]


def outputs_and_gradients(
    function: Any, case: LocalCase, inputs: dict[str, Tensor], wide: bool
) -> dict[str, Tensor]:
    """Everything `function` returns and every gradient, by name."""
    options: dict[str, Any] = {}
    if case.lengths:
        options["cu_seqlens"] = torch.tensor((0, *case.lengths)).cumsum(0).to(inputs["q"].device)
    if case.rope_base is not None:
        options["rope_base"] = case.rope_base
    if case.scale is not None:
        options["scale"] = case.scale
    if "padding_mask" in inputs:
        options["padding_mask"] = inputs["padding_mask"]
    leaf = {
        name: (x.double() if wide else x).detach().clone().requires_grad_()
        for name, x in inputs.items()
        if name in "qkv"
    }
    o, entropy = function(case, leaf["q"], leaf["k"], leaf["v"], options)
    sum_dtype = torch.float64 if wide else torch.float32
    loss = (o.to(sum_dtype) * inputs["do"].to(sum_dtype)).sum()
    results = {"o": o}
    if case.entropy:
        results["entropy"] = entropy
        loss = loss + (entropy * inputs["dentropy"]).sum()
    grads = torch.autograd.grad(loss, list(leaf.values()))
    return results | {f"d{name}": g for name, g in zip(leaf, grads, strict=True)}


def relative_errors(
    case: LocalCase, dtype: torch.dtype, device: str, seed: int
) -> dict[str, float]:
    """Error of every output and gradient; a second run must give the same bits."""
    inputs = make_inputs(case, dtype, device, seed)
    truth = outputs_and_gradients(exact, case, inputs, wide=True)
    # a window of one has entropy 0 and no gradient to q and k
    return compared(
        lambda: outputs_and_gradients(fused, case, inputs, wide=False),
        truth,
        device,
        relative_or_of_ones,
    )[1]


def changed_past(device: str, dtype: torch.dtype) -> int:
    """How many numbers of the past change, in any bit, when later positions do; 0 if causal."""
    case = LocalCase(length=150, dim=32, value_dim=32, window=40, heads=2)
    inputs = make_inputs(case, dtype, device, 0)
    before = fused(case, inputs["q"], inputs["k"], inputs["v"], {})
    changed = 0
    for t in (1, 63, 64, 100, 149):
        later = [inputs[name].clone() for name in "qkv"]
        for x in later:
            x[:, t:] = 50 * torch.randn_like(x[:, t:])
        after = fused(case, *later, {})
        changed += sum(
            int((a[:, :t] != b[:, :t]).sum()) for a, b in zip(before, after, strict=True)
        )
        assert not torch.equal(after[0][:, t:], before[0][:, t:])
    return changed


def compiled_difference(device: str) -> float:
    """Relative difference of gradients with and without `torch.compile(fullgraph=True)`."""
    case = LocalCase(length=45, rope_base=100.0)
    inputs = make_inputs(case, torch.float32, device, 0)
    bounds = torch.tensor([0, 20, 20, 45], device=device)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o, entropy = fused(case, q, k, v, {"cu_seqlens": bounds, "rope_base": 100.0})
        return (o * o).sum() + entropy.sum()

    return difference_if_compiled(loss, [inputs[name] for name in "qkv"])


GPU_CASES = [
    LocalCase(heads=4, kv_heads=2, value_dim=20),
    LocalCase(batch=2, length=517, heads=3, kv_heads=3, dim=64, value_dim=64, window=128),
    LocalCase(length=333, heads=4, kv_heads=1, dim=64, value_dim=64, window=128, entropy=False),
    LocalCase(length=300, dim=128, value_dim=128, window=100, rope_base=1e4),
    LocalCase(length=130, dim=64, value_dim=128, window=500),
    LocalCase(length=100, dim=80, value_dim=32, window=1),
    LocalCase(length=200, dim=64, value_dim=64, window=128, spread=8.0),
    LocalCase(length=200, dim=32, value_dim=32, window=50, prefix=49),
    LocalCase(batch=2, length=300, dim=64, value_dim=64, window=33, real=0.6, rope_base=1e4),
    LocalCase(lengths=(0, 1, 257, 64, 0, 130, 0), dim=64, value_dim=64, window=128, rope_base=1e4),
    # in bfloat16 gradients of one walk, as those of the second
    LocalCase(length=9000, heads=3, kv_heads=3, dim=64, value_dim=64, window=129),
    LocalCase(length=700, heads=16, kv_heads=16, dim=64, value_dim=48, window=65, entropy=False),
    LocalCase(
        length=190, heads=2, kv_heads=2, scale=-0.2, dim=32, value_dim=64, window=100, spread=8.0
    ),
    LocalCase(lengths=(0, 1, 257, 64, 0, 900), kv_heads=2, dim=64, value_dim=64, window=128),
]

INTERPRETER_CASES = [
    LocalCase(heads=4, kv_heads=2, value_dim=20, window=17),
    LocalCase(length=45, dim=20, window=1),
    LocalCase(batch=2, length=45, dim=64, value_dim=32, window=100, entropy=False),
    LocalCase(length=33, spread=8.0, window=64),
    LocalCase(length=40, window=30, prefix=29),
    LocalCase(batch=2, length=50, real=0.5, rope_base=1e4),
    LocalCase(lengths=(0, 1, 33, 0, 40, 0), window=40, rope_base=1e4),
    LocalCase(length=40, scale=-0.7),
    LocalCase(length=40, scale=0.0),
    LocalCase(length=0),
]

# Those whose gradients one walk makes, in blocks of 32; a window reaches one block back, or two.
WALKED_CASES = [
    LocalCase(length=150, heads=1, window=64),
    LocalCase(batch=2, length=130, kv_heads=2, value_dim=20, window=65),
    LocalCase(length=129, heads=1, window=63, entropy=False, spread=8.0),
    LocalCase(length=97, heads=1, dim=20, window=33),
    LocalCase(length=70, heads=1, window=1),
    LocalCase(length=20, heads=1, window=100),
    LocalCase(lengths=(0, 1, 63, 0, 40, 37, 0), heads=1, window=50, rope_base=1e4),
    LocalCase(lengths=(33, 40, 30), heads=1, window=64, entropy=False),
]
