# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The learned softmax map of a block of tokens, one head, and its gradients.

With l = x W, p = softmax(l) and n = softmax(-l) a row of logits receives

    dl = p (dp - sum p dp) - n (dn - sum n dn),     dx = dl W^T,     dW = sum over tokens x^T dl.

Features ``[tokens, H, 2 M]`` are addressed as ``[tokens, 2 H, M]``: a half is a head. Where W is
too wide for registers its D rows are taken in chunks of BC.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vort.ops.custom import Tensors, custom_op
from vort.ops.gpu.launcher import dense, launch
from vort.ops.gpu.parts import LOG2E, fence_loads, load_rows, store_rows

from .shared import Tiling, blocks, choose_tiling, product

__all__ = ["hedgehog_fused"]

# Programs that share the tokens of a weight gradient. Each leaves a sum of its own, so their number
# is bounded; several for each multiprocessor, so that the last ones to end leave few idle.
PROGRAMS = 1024


@triton.jit
def load_weight(w, h, c, D: tl.constexpr, M: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr):
    """Rows ``c..c+BC`` of a head's weight as ``[BC, BM]`` float32."""
    return load_rows(w, h * D + c, D - c, 0, 1, 0, M, BC, BM).to(tl.float32)


@triton.jit
def logits_of(
    x, w, token, left, h, H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BT: tl.constexpr,
    BC: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """``x W`` of BT tokens ``[BT, BM]``, chunk after chunk."""
    logits = tl.zeros([BT, BM], dtype=tl.float32)
    for c in range(0, D, BC):
        xt = load_rows(x, token, left, h, H, c, D, BT, BC)
        wt = load_weight(w, h, c, D, M, BC, BM)
        fence_loads(c)
        logits = product(xt, wt, logits, x.dtype.element_ty)
    return logits


@triton.jit
def softmax(logits, M: tl.constexpr, BM: tl.constexpr):
    """Over the M real columns; zero in the others."""
    real = (tl.arange(0, BM) < M)[None, :]
    scaled = tl.where(real, logits * LOG2E, float("-inf"))
    p = tl.exp2(scaled - tl.max(scaled, axis=1)[:, None])
    return p * (1.0 / tl.sum(p, axis=1))[:, None]


@triton.jit(do_not_specialize=["tokens"])
def hedgehog_kernel(
    x, w, out, tokens,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """Features of BT tokens, one head."""
    pid = tl.program_id(0)
    h = pid % H
    token = (pid // H).to(tl.int64) * BT
    left = tokens - token
    logits = logits_of(x, w, token, left, h, H, D, M, BT, BC, BM)
    store_rows(out, softmax(logits, M, BM), token, left, 2 * h, 2 * H, 0, M, BT, BM)
    store_rows(out, softmax(-logits, M, BM), token, left, 2 * h + 1, 2 * H, 0, M, BT, BM)


@triton.jit(do_not_specialize=["tokens", "parts"])
def hedgehog_gradient_kernel(
    x, w, dout, dx, dw, tokens, parts,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """BC columns of ``dx`` for every parts-th block of a head, and these blocks' share of ``dw``.

    ``dw`` is ``[parts, H, D, M]``: nothing is added atomically, so two runs agree to the bit.
    """
    NARROW: tl.constexpr = x.dtype.element_ty
    CHUNKS: tl.constexpr = (D + BC - 1) // BC
    pid = tl.program_id(0)
    h = pid % H
    c = (pid // H) % CHUNKS * BC
    part = pid // (H * CHUNKS)
    own = load_weight(w, h, c, D, M, BC, BM)
    acc = tl.zeros([BC, BM], dtype=tl.float32)
    for step in range(tl.cdiv(tl.cdiv(tokens, BT) - part, parts)):
        token = (part.to(tl.int64) + step * parts) * BT
        left = tokens - token
        xt = load_rows(x, token, left, h, H, c, D, BT, BC)
        dp = load_rows(dout, token, left, 2 * h, 2 * H, 0, M, BT, BM).to(tl.float32)
        dn = load_rows(dout, token, left, 2 * h + 1, 2 * H, 0, M, BT, BM).to(tl.float32)
        fence_loads(step)
        if CHUNKS == 1:
            logits = product(xt, own, tl.zeros([BT, BM], dtype=tl.float32), NARROW)
        else:
            logits = logits_of(x, w, token, left, h, H, D, M, BT, BC, BM)
        p, n = softmax(logits, M, BM), softmax(-logits, M, BM)
        dl = p * (dp - tl.sum(p * dp, axis=1)[:, None])
        dl -= n * (dn - tl.sum(n * dn, axis=1)[:, None])
        dxt = product(dl, tl.trans(own), tl.zeros([BT, BC], dtype=tl.float32), NARROW)
        store_rows(dx, dxt, token, left, h, H, c, D, BT, BC)
        acc = product(tl.trans(xt), dl, acc, NARROW)
    store_rows(dw, acc, (part * H + h) * D + c, D - c, 0, 1, 0, M, BC, BM)


class Inputs(NamedTuple):
    """The arguments of `hedgehog_fused`."""

    x: Tensor
    weight: Tensor


def _sizes(inputs: Inputs) -> tuple[int, int, Tiling, dict[str, Any]]:
    """Tokens, heads with weights of their own, block sizes and compile-time constants."""
    x, weight = inputs
    head_dim, features = weight.shape[-2:]
    # a weight that all heads share sees their rows as tokens of one head
    heads = 1 if weight.ndim == 2 else weight.shape[0]
    tiling = choose_tiling(head_dim, features, x.dtype)
    constants = {
        "H": heads, "D": head_dim, "M": features, "BC": tiling.chunk, "BM": tiling.features,
    }  # fmt: skip
    return prod(x.shape[:-1]) // heads, heads, tiling, constants


def _forward(inputs: Inputs) -> tuple[Tensor]:
    tokens, heads, tiling, constants = _sizes(inputs)
    tile = tiling.forward
    (out,) = _shapes(inputs)
    launch(
        hedgehog_kernel, heads * blocks(tokens, tile.columns), dense(inputs.x),
        dense(inputs.weight), out, tokens, BT=tile.columns, tile=tile, **constants,
    )  # fmt: skip
    return (out,)


def _backward(inputs: Inputs, kept: Tensors, grads: Tensors, needs: Sequence[bool]) -> Tensors:
    tokens, heads, tiling, constants = _sizes(inputs)
    tile, x, weight = tiling.backward, dense(inputs.x), dense(inputs.weight)
    chunks = blocks(weight.shape[-2], tiling.chunk)
    parts = min(blocks(tokens, tile.columns), max(1, PROGRAMS // (heads * chunks)))
    dx = torch.empty_like(x)
    partial = x.new_empty(parts, *weight.shape, dtype=torch.float32)
    launch(
        hedgehog_gradient_kernel, parts * heads * chunks, x, weight, dense(grads[0]), dx,
        partial, tokens, parts, BT=tile.columns, tile=tile, **constants,
    )  # fmt: skip
    return dx, partial.sum(0).to(weight.dtype)


def _shapes(inputs: Inputs) -> tuple[Tensor]:
    return (inputs.x.new_empty(*inputs.x.shape[:-1], 2 * inputs.weight.shape[-1]),)


_hedgehog = custom_op(
    "vort::hedgehog_fused", Inputs, _forward, _backward, _shapes, gradients=("x", "weight")
)


def hedgehog_fused(x: Tensor, weight: Tensor) -> Tensor:
    """Return what `hedgehog_features` returns, from fused GPU kernels, forward and backward.

    x is bfloat16 or float32, `[..., d]` with weight `[d, m]` or `[..., H, d]` with weight
    `[H, d, m]`; d and m at most 256. Sums are float32, and so is the weight gradient until it is
    rounded to the weight's dtype.
    """
    features: Tensor = _hedgehog(Inputs(x, weight))[0]
    return features
