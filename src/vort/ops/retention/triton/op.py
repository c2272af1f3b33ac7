"""`vort::retention_forward` and `vort::retention_backward`: the kernels as PyTorch operators.

Custom operators with fake kernels, so that `torch.compile(fullgraph=True)` sees through them.
An operator returns no None: what is absent is an empty tensor. Calls that nothing traces go through
an autograd function instead, which costs the host far less than an operator does.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vort.ops.custom import traced
from vort.ops.retention.normalizer import DEFAULT_EPS
from vort.ops.retention.state import RetentionState

from .launch import NOTHING, Pair, Problem, run_backward, run_forward

__all__ = ["retention_triton"]

NORMALIZER_CODES = {"none": 0, "decayed": 1, "undecayed": 2}


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    write: Tensor,
    log_decay: Tensor,
    read: Tensor | None,
    G: Tensor | None,
    b: Tensor | None,
    cu_seqlens: Tensor | None,
    normalizer: int,
    include_self: bool,
    keep_last: bool,
    eps: float,
    span: int,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Pair]:
    """Outputs, raw normaliser, final G and b, what backward may start from; None where absent."""
    problem = Problem.of(q, v, write.shape[-1], cu_seqlens, normalizer, include_self, eps, span)
    with torch.cuda.device_of(q):  # the GPU that holds the data, whichever is current
        return run_forward(
            problem, q.contiguous(), k.contiguous(), v.contiguous(), write.contiguous(),
            log_decay.contiguous(), _dense(read), _dense(G), _dense(b), keep_last,
        )  # fmt: skip


def _gradients(
    do: Tensor,
    dG_last: Tensor | None,
    db_last: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    write: Tensor,
    log_decay: Tensor,
    read: Tensor | None,
    G: Tensor | None,
    b: Tensor | None,
    cu_seqlens: Tensor | None,
    o: Tensor,
    den: Tensor | None,
    normalizer: int,
    include_self: bool,
    decay_grad: bool,
    eps: float,
    span: int,
    kept: Pair = NOTHING,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None
]:
    """Gradients to q, k, v, write, read, log_decay, initial G, initial b; None where absent."""
    problem = Problem.of(q, v, write.shape[-1], cu_seqlens, normalizer, include_self, eps, span)
    with torch.cuda.device_of(q):
        dq, dk, dv, dwrite, dread, dlog, dG, db = run_backward(
            problem, do.contiguous(), q.contiguous(), k.contiguous(), v.contiguous(),
            write.contiguous(), log_decay.contiguous(), _dense(read), _dense(G), _dense(b),
            _dense(dG_last), _dense(db_last), o, den if normalizer else None, decay_grad, kept,
        )  # fmt: skip
        if dlog is not None:
            dlog = (dlog.sum(0) if log_decay.dim() == 1 else dlog).to(log_decay.dtype)
    return dq, dk, dv, dwrite, dread, dlog, dG, db


@torch.library.custom_op("vort::retention_forward", mutates_args=())
def retention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    write: Tensor,
    log_decay: Tensor,
    read: Tensor | None,
    G: Tensor | None,
    b: Tensor | None,
    cu_seqlens: Tensor | None,
    normalizer: int,
    include_self: bool,
    keep_last: bool,
    eps: float,
    span: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs, raw normaliser, final G, final b."""
    o, den, G_last, b_last, _ = _forward(
        q, k, v, write, log_decay, read, G, b, cu_seqlens, normalizer, include_self, keep_last,
        eps, span,
    )  # fmt: skip
    absent = [q.new_empty(0, dtype=torch.float32) for _ in range(3)]
    return (
        o,
        absent[0] if den is None else den,
        absent[1] if G_last is None else G_last,
        absent[2] if b_last is None else b_last,
    )


@retention_forward.register_fake
def _(  # type: ignore[no-untyped-def]
    q, k, v, write, log_decay, read, G, b, cu_seqlens, normalizer, include_self, keep_last, eps,
    span,
):  # fmt: skip
    batch, _, heads, key_dim = q.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    terms = write.shape[-1]
    norm_terms = (0, terms, 1)[normalizer]
    wide = {"dtype": torch.float32}
    den = v.new_empty(v.shape[:-1] if normalizer else (0,), **wide)
    keep_b = keep_last and normalizer
    G_size = (sequences, heads, terms, key_dim, v.shape[-1]) if keep_last else (0,)
    b_size = (sequences, heads, norm_terms, key_dim) if keep_b else (0,)
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    return o, den, q.new_empty(G_size, **wide), q.new_empty(b_size, **wide)


@torch.library.custom_op("vort::retention_backward", mutates_args=())
def retention_backward(
    do: Tensor,
    dG_last: Tensor | None,
    db_last: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    write: Tensor,
    log_decay: Tensor,
    read: Tensor | None,
    G: Tensor | None,
    b: Tensor | None,
    cu_seqlens: Tensor | None,
    o: Tensor,
    den: Tensor,
    normalizer: int,
    include_self: bool,
    decay_grad: bool,
    eps: float,
    span: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients to q, k, v, write, read, log_decay, initial G, initial b."""
    dq, dk, dv, dwrite, *others = _gradients(
        do, dG_last, db_last, q, k, v, write, log_decay, read, G, b, cu_seqlens, o, den,
        normalizer, include_self, decay_grad, eps, span,
    )  # fmt: skip
    dread, dlog, dG, db = (q.new_empty(0, dtype=torch.float32) if x is None else x for x in others)
    return dq, dk, dv, dwrite, dread, dlog, dG, db


@retention_backward.register_fake
def _(  # type: ignore[no-untyped-def]
    do, dG_last, db_last, q, k, v, write, log_decay, read, G, b, cu_seqlens, o, den, normalizer,
    include_self, decay_grad, eps, span,
):  # fmt: skip
    def like(x: Tensor | None, wanted: bool = True) -> Tensor:
        if x is None or not wanted:
            absent: Tensor = q.new_empty(0, dtype=torch.float32)
            return absent
        out: Tensor = torch.empty_like(x, memory_format=torch.contiguous_format)
        return out

    return (
        like(q), like(k), like(v), like(write), like(read), like(log_decay, decay_grad),
        like(G), like(b),
    )  # fmt: skip


def _setup_context(ctx: Any, inputs: tuple[Any, ...], kept: tuple[Tensor | None, ...]) -> None:
    q, k, v, write, log_decay, read, G, b, cu_seqlens, *options = inputs
    ctx.normalizer, ctx.include_self, ctx.keep_last, ctx.eps, ctx.span = options
    ctx.save_for_backward(q, k, v, write, log_decay, read, G, b, cu_seqlens, *kept)


def _backward(ctx: Any, do: Tensor, dden: Tensor, dG_last: Tensor, db_last: Tensor) -> Any:
    q, k, v, write, log_decay, read, G, b, cu_seqlens, o, den = ctx.saved_tensors
    decay_grad = ctx.needs_input_grad[4]
    keep_b = ctx.keep_last and ctx.normalizer != 0
    dq, dk, dv, dwrite, dread, dlog, dG, db = retention_backward(
        do, dG_last if ctx.keep_last else None, db_last if keep_b else None,
        q, k, v, write, log_decay, read, G, b, cu_seqlens, o, den,
        ctx.normalizer, ctx.include_self, decay_grad, ctx.eps, ctx.span,
    )  # fmt: skip
    return (
        dq, dk, dv, dwrite,
        dlog if decay_grad else None,
        None if read is None else dread,
        None if G is None else dG,
        None if b is None else db,
        None, None, None, None, None, None,
    )  # fmt: skip


retention_forward.register_autograd(
    _backward, setup_context=lambda ctx, inputs, output: _setup_context(ctx, inputs, output[:2])
)


class _Retention(torch.autograd.Function):
    """The same as the operator, without a dispatcher in between.

    It also keeps states for the backward, whose size an operator would have to foretell.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor | None, ...]:
        o, den, G_last, b_last, kept = _forward(*inputs)
        _setup_context(ctx, inputs, (o, den, *kept))
        return o, G_last, b_last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dG_last: Tensor, db_last: Tensor) -> Any:
        q, k, v, write, log_decay, read, G, b, cu_seqlens, o, den, *kept = ctx.saved_tensors
        decay_grad = ctx.needs_input_grad[4]
        dq, dk, dv, dwrite, dread, dlog, dG, db = _gradients(
            do, dG_last if ctx.keep_last else None, db_last if ctx.keep_last else None,
            q, k, v, write, log_decay, read, G, b, cu_seqlens, o, den,
            ctx.normalizer, ctx.include_self, decay_grad, ctx.eps, ctx.span, tuple(kept),
        )  # fmt: skip
        return dq, dk, dv, dwrite, dlog, dread, dG, db, None, None, None, None, None, None


def retention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    write: Tensor,
    log_decay: Tensor,
    *,
    read: Tensor | None = None,
    normalizer: str = "decayed",
    include_self: bool = True,
    initial_state: RetentionState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    eps: float = DEFAULT_EPS,
    span: int | None = None,
) -> tuple[Tensor, RetentionState | None]:
    """What `retention` returns, from fused GPU kernels, forward and backward.

    q, k [B, T, H, K]; v [B, T, H, V]; write, read [B, T, H, S]; log_decay [S] or [H, S], <= 0.
    q, k and v share one dtype, bfloat16 or float32 (products in full float32 then); sums and states
    are float32. K, V in 1..256, S in 1..32, any T. `span`, the tokens between stored states, is
    chosen by shape unless given (a power of two, in bfloat16 at least 128); `chunk_size` belongs to
    the other backends and is unused. Rates sorted from slow to fast cost least: fast ones need no
    state far into a span.
    """
    _check(q, k, v, write, normalizer)
    G = b = None
    if initial_state is not None:
        G = initial_state.G.float()
        if normalizer != "none":
            if initial_state.b is None:
                raise ValueError(f"initial_state.b must be given for normalizer={normalizer!r}")
            b = initial_state.b.float()
    inputs = (
        q, k, v, write, log_decay, read, G, b, cu_seqlens, NORMALIZER_CODES[normalizer],
        include_self, output_final_state, eps, span or 0,
    )  # fmt: skip
    if traced(q):
        o, _, G_last, b_last = retention_forward(*inputs)
    else:
        o, G_last, b_last = _Retention.apply(*inputs)  # type: ignore[no-untyped-call]
    if not output_final_state:
        return o, None
    return o, RetentionState(G_last, b_last if normalizer != "none" else None)


def _check(q: Tensor, k: Tensor, v: Tensor, write: Tensor, normalizer: str) -> None:
    if normalizer not in NORMALIZER_CODES:
        raise ValueError(
            f"normalizer must be one of {sorted(NORMALIZER_CODES)}, got {normalizer!r}"
        )
    if q.dtype not in (torch.bfloat16, torch.float32) or not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            "q, k and v must share one dtype, bfloat16 or float32, "
            f"got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if max(q.shape[-1], v.shape[-1]) > 256:
        raise ValueError(f"K and V must be at most 256, got {q.shape[-1]} and {v.shape[-1]}")
    if write.shape[-1] > 32:
        raise ValueError(f"S must be at most 32, got {write.shape[-1]}")
