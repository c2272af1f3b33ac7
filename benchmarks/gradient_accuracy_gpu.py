"""How exact bfloat16 gradients are where values have a mean: VORT and flash attention.

    python benchmarks/gradient_accuracy_gpu.py [--out gradient_accuracy_gpu.json]

A normalised memory averages values: their mean passes through, and the gradient to the queries is
made of what differs from it. The more tokens are averaged, the less that is, while whatever was
rounded to bfloat16 on the way (outputs, states, weights) was rounded in proportion to the mean. So
dq loses digits, in softmax attention over many like keys as well. One head of 64, features drawn
from 0.1 to 1.1, time scales from one token to ten thousand, values of standard deviation 1 about
the mean; every error relative to float64 on the same inputs, the mean over draws.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from vort.lab.report.provenance import provenance
from vort.ops.retention import retention

LENGTHS = (512, 2_048, 8_192)
MEANS = (0.0, 0.1, 0.5, 1.0)
SIZE, TERMS, DRAWS = 64, 8, 3

Op = Callable[..., Tensor]


def draw(length: int, mean: float, seed: int) -> dict[str, Tensor]:
    """Inputs of both ops and the gradient that comes back."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, length, 1, SIZE)
    q, k = (torch.rand(shape, generator=generator) + 0.1 for _ in range(2))
    v, do = (torch.randn(shape, generator=generator) for _ in range(2))
    gates = (torch.rand(1, length, 1, TERMS, generator=generator) + 0.1 for _ in range(2))
    write, read = (x.cuda() for x in gates)
    half = {"q": q, "k": k, "v": v + mean, "do": do}
    return {name: x.cuda().bfloat16() for name, x in half.items()} | {"write": write, "read": read}


def vort(backend: str, q: Tensor, k: Tensor, v: Tensor, write: Tensor, read: Tensor) -> Tensor:
    log_decay = -torch.logspace(-4, 0, TERMS, device="cuda").to(write.dtype)
    o, _ = retention(q, k, v, write, log_decay, read=read, backend=backend)
    return o


def attention(kernel: SDPBackend, q: Tensor, k: Tensor, v: Tensor, **_: Tensor) -> Tensor:
    with sdpa_kernel(kernel):
        o = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    return o.transpose(1, 2)


# (in bfloat16, in float64)
OPS: dict[str, tuple[Op, Op]] = {
    "vort S=8": (partial(vort, "triton"), partial(vort, "exact")),
    "sdpa flash": (
        partial(attention, SDPBackend.FLASH_ATTENTION),
        partial(attention, SDPBackend.MATH),
    ),
}


def gradients(op: Op, inputs: dict[str, Tensor], wide: bool) -> dict[str, Tensor]:
    """Gradients to q, k and v, in float64 if `wide`."""
    x = {name: value.double() if wide else value.clone() for name, value in inputs.items()}
    do = x.pop("do")
    leaves = [x[name].requires_grad_() for name in "qkv"]
    found = torch.autograd.grad(op(**x), leaves, do)
    return {f"d{name}": grad.double() for name, grad in zip("qkv", found, strict=True)}


def errors(name: str, length: int, mean: float, seed: int) -> dict[str, float]:
    narrow, wide = OPS[name]
    inputs = draw(length, mean, seed)
    got, truth = gradients(narrow, inputs, False), gradients(wide, inputs, True)
    return {key: ((got[key] - x).norm() / x.norm()).item() for key, x in truth.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    rows = []
    print(f"{'':<12}{'length':>8}{'mean':>6}{'dq':>10}{'dk':>10}{'dv':>10}")
    for name in OPS:
        for length in LENGTHS:
            for mean in MEANS:
                found = [errors(name, length, mean, seed) for seed in range(DRAWS)]
                row = {key: sum(e[key] for e in found) / DRAWS for key in found[0]}
                rows.append({"op": name, "length": length, "mean": mean, **row})
                told = "".join(f"{row[key]:10.1e}" for key in ("dq", "dk", "dv"))
                print(f"{name:<12}{length:>8,}{mean:>6}{told}", flush=True)
    if arguments.out:
        report = {"made_by": provenance(), "draws": DRAWS, "rows": rows}
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
