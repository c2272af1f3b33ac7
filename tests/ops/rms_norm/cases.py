"""Shapes and options to check, and the relative error of the output and every gradient.

The truth is the equation in float64 on the very inputs the kernels get (rounded to bfloat16 first
where they are bfloat16). Errors are `|x - truth| / |truth|`, NaN never passes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.ops.case import NamedCase, compared, difference_if_compiled, relative
from vort.ops.rms_norm.triton import rms_norm_fused


@dataclass(frozen=True)
class NormCase(NamedCase):
    """One call of the op; the weight is float32, or of the type of x, or absent."""

    shape: tuple[int, ...] = (2, 37)
    dim: int = 64
    weight: str | None = "float32"
    eps: float = 1e-6
    zeros: bool = False  # some rows are 0
    layout: str = "dense"  # or a slice of a wider tensor, or transposed


def make_inputs(case: NormCase, dtype: torch.dtype, device: str, seed: int) -> dict[str, Tensor]:
    """Fresh random x (laid out as the case says), weight, and the gradient that comes back."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    # rows of all sizes, as far as their squares have a float32
    x = normal(*case.shape, case.dim) * 10 ** (2 * normal(*case.shape, 1))
    if case.zeros:
        x.view(-1, case.dim)[::3] = 0
    tensors = {"x": x.to(dtype), "dy": normal(*case.shape, case.dim).to(dtype)}
    if case.weight is not None:
        wanted = torch.float32 if case.weight == "float32" else dtype
        tensors["weight"] = (1 + 0.5 * normal(case.dim)).to(wanted)
    return tensors


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers elsewhere in memory: differentiable, what surrounds them is NaN."""
    if layout == "dense":
        return x
    if layout == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    heads = torch.full_like(x[..., :1, :], torch.nan)
    slices = {
        "slice of tokens": torch.cat([heads, x, heads], -2)[..., 1:-1, :],
        "slice of rows": torch.cat([torch.full_like(x, torch.nan), x], -1)[..., x.shape[-1] :],
    }
    return slices[layout]


def exact(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The definition."""
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight


def outputs_and_gradients(
    case: NormCase, inputs: dict[str, Tensor], wide: bool
) -> dict[str, Tensor]:
    """y and every gradient, by name: of the definition in float64, or of the kernels."""
    leaves = {
        name: (tensor.double() if wide else tensor).detach().clone().requires_grad_()
        for name, tensor in inputs.items()
        if name != "dy"
    }
    function, weight = exact if wide else rms_norm_fused, leaves.get("weight")
    y = function(laid_out(leaves["x"], case.layout), weight, case.eps)
    grads = torch.autograd.grad(y, list(leaves.values()), inputs["dy"].to(y.dtype))
    return {"y": y} | {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}


def relative_errors(case: NormCase, dtype: torch.dtype, device: str, seed: int) -> dict[str, float]:
    """Error of the output and every gradient; a second run must give the same bits."""
    inputs = make_inputs(case, dtype, device, seed)
    truth = outputs_and_gradients(case, inputs, wide=True)
    got, errors = compared(
        lambda: outputs_and_gradients(case, inputs, wide=False), truth, device, _error
    )
    for name in truth:
        source = inputs["dy" if name == "y" else name[1:]]
        if got[name].dtype != source.dtype or got[name].shape != source.shape:
            errors[f"{name} is {got[name].dtype} {list(got[name].shape)}"] = float("nan")
    return errors


def _error(name: str, got: Tensor, truth: Tensor) -> float:
    if name != "dx":
        return relative(name, got, truth)
    # row by row: gradients to small rows are large
    size = truth.norm(dim=-1, keepdim=True)
    wrong = ((got - truth) / size).norm() / max(size.numel(), 1) ** 0.5
    return wrong.item() if truth.numel() else 0.0


def compiled_difference(device: str) -> float:
    """Relative difference of gradients with and without `torch.compile(fullgraph=True)`."""
    case = NormCase()
    inputs = make_inputs(case, torch.float32, device, 0)

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        y = rms_norm_fused(x, weight, case.eps)
        return (rms_norm_fused(y * x, None, case.eps) * inputs["dy"]).sum()

    return difference_if_compiled(loss, [inputs["x"], inputs["weight"]])


GPU_CASES = [
    NormCase(shape=(3, 5001, 2)),
    NormCase(shape=(4, 20011, 2), weight="same"),  # programs walk several blocks
    NormCase(shape=(2, 333), dim=128),
    NormCase(shape=(7,), dim=1000),
    NormCase(shape=(333,), dim=1024, weight=None),
    NormCase(shape=(2, 101, 3), dim=20),
    NormCase(shape=(5,), dim=3),
    NormCase(shape=(99,), zeros=True),
    NormCase(shape=(99,), eps=0.0),
    NormCase(shape=(2, 77, 3), layout="slice of tokens"),
    NormCase(shape=(2, 77, 3), dim=20, layout="slice of rows"),
    NormCase(shape=(2, 77, 3), layout="transposed"),
    NormCase(shape=(0, 4)),
]

INTERPRETER_CASES = [
    NormCase(),
    NormCase(shape=(3, 7, 2), dim=20, weight=None),
    NormCase(shape=(65,), dim=128),
    NormCase(shape=(7,), dim=1000),
    NormCase(shape=(5,), dim=1024),
    NormCase(shape=(), dim=64),
    NormCase(shape=(5,), dim=3),
    NormCase(zeros=True),
    NormCase(eps=0.0),
    NormCase(shape=(2, 7, 3), dim=20, layout="slice of tokens"),
    NormCase(shape=(2, 7, 3), dim=20, layout="slice of rows"),
    NormCase(shape=(2, 7, 3), layout="transposed"),
    NormCase(shape=(0, 4)),
    NormCase(shape=(0, 4), weight=None),
]
