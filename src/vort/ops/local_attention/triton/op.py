"""`vort::local_attention_fused` and its backward: the kernels as PyTorch operators.

Custom operators with fake kernels, so that `torch.compile(fullgraph=True)` sees through them.
An operator returns no None: what is absent is an empty tensor. Calls that nothing traces go through
an autograd function instead, which costs the host far less than an operator does.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vort.ops.custom import traced
from vort.ops.local_attention.backends import WIDEST

from .launch import run_backward, run_forward

__all__ = ["attend_fused"]


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    valid: Tensor | None,
    window: int,
    scale: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    with torch.cuda.device_of(q):  # the GPU that holds the data, whichever is current
        return run_forward(
            q.contiguous(), k.contiguous(), v.contiguous(), _dense(start), _dense(valid),
            window, scale, with_entropy,
        )  # fmt: skip


def _gradients(
    grad_o: Tensor | None,
    grad_entropy: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    valid: Tensor | None,
    o: Tensor,
    entropy: Tensor | None,
    lse: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_o = torch.zeros_like(o) if grad_o is None else grad_o
    with torch.cuda.device_of(q):
        return run_backward(
            grad_o.contiguous(), _dense(grad_entropy), q.contiguous(), k.contiguous(),
            v.contiguous(), _dense(start), _dense(valid), o, entropy, lse, window, scale,
        )  # fmt: skip


@torch.library.custom_op("vort::local_attention_fused", mutates_args=())
def local_attention_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    valid: Tensor | None,
    window: int,
    scale: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, entropy and log of the softmax's sum."""
    o, entropy, lse = _forward(q, k, v, start, valid, window, scale, with_entropy)
    return o, lse.new_empty(0) if entropy is None else entropy, lse


@local_attention_fused.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    valid: Tensor | None,
    window: int,
    scale: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    entropy = torch.empty_like(lse) if with_entropy else lse.new_empty(0)
    return v.new_empty(*q.shape[:3], v.shape[-1]), entropy, lse


@torch.library.custom_op("vort::local_attention_fused_backward", mutates_args=())
def local_attention_fused_backward(
    grad_o: Tensor,
    grad_entropy: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    valid: Tensor | None,
    o: Tensor,
    entropy: Tensor,
    lse: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to q, k and v."""
    return _gradients(
        grad_o, grad_entropy, q, k, v, start, valid, o, entropy, lse, window, scale
    )  # fmt: skip


@local_attention_fused_backward.register_fake
def _(
    grad_o: Tensor,
    grad_entropy: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    valid: Tensor | None,
    o: Tensor,
    entropy: Tensor,
    lse: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    q, k, v, start, valid, ctx.window, ctx.scale, ctx.with_entropy = inputs
    ctx.save_for_backward(q, k, v, start, valid, *output)


def _differentiate(
    ctx: Any, grad_o: Tensor, grad_entropy: Tensor, grad_lse: Tensor
) -> tuple[Any, ...]:
    grads = local_attention_fused_backward(
        grad_o, grad_entropy if ctx.with_entropy else None, *ctx.saved_tensors, ctx.window,
        ctx.scale,
    )  # fmt: skip
    return (*grads, None, None, None, None, None)


local_attention_fused.register_autograd(_differentiate, setup_context=_save)


class _LocalAttention(torch.autograd.Function):
    """The same as the operator, without a dispatcher in between."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        o, entropy, lse = _forward(*inputs)
        _save(ctx, inputs, (o, entropy, lse))
        return o, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_o: Tensor | None, grad_entropy: Tensor | None) -> Any:
        q, k, v, start, valid, o, entropy, lse = ctx.saved_tensors
        grads = _gradients(
            grad_o, grad_entropy, q, k, v, start, valid, o, entropy, lse, ctx.window, ctx.scale
        )
        return (*grads, None, None, None, None, None)


def attend_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    *,
    scale: float,
    start: Tensor | None = None,
    valid: Tensor | None = None,
    return_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return what `attend_blockwise` returns, from fused GPU kernels, forward and backward.

    q, k and v share one dtype, bfloat16 or float32 (products in full float32 then); sums and the
    entropy are float32. Head dimensions in 1..128, any length, window and number of prefix keys.
    """
    if q.dtype not in (torch.bfloat16, torch.float32) or not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            "q, k and v must share one dtype, bfloat16 or float32, "
            f"got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        raise ValueError(
            f"head dimensions must be at most {WIDEST}, got {q.shape[-1]} and {v.shape[-1]}"
        )
    inputs = (q, k, v, start, valid, window, scale, return_entropy)
    if traced(q):
        o, entropy, _ = local_attention_fused(*inputs)
        return o, entropy if return_entropy else None
    o, entropy = _LocalAttention.apply(*inputs)  # type: ignore[no-untyped-call]
    return o, entropy
