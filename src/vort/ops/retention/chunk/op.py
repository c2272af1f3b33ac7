"""The parallel form: training on a CPU and anywhere; forward and backward written by hand."""

from typing import Any

import torch
from torch import Tensor

from vort.ops.retention.chunk.backward import run_backward
from vort.ops.retention.chunk.forward import run_forward
from vort.ops.retention.chunk.layout import SHORTEST, Plan
from vort.ops.retention.chunk.problem import Problem
from vort.ops.retention.normalizer import DEFAULT_EPS
from vort.ops.retention.state import RetentionState, compute_dtype, state_terms

__all__ = ["retention_chunk"]


def retention_chunk(
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
) -> tuple[Tensor, RetentionState | None]:
    """What `retention` returns, in time and memory linear in T.

    Arguments and shapes are those of `retention`. `chunk_size` is a multiple of 16; shorter
    sequences get shorter chunks.

    >>> q = k = v = write = torch.ones(1, 3, 1, 1)
    >>> o, _ = retention_chunk(q, k, v, write, torch.zeros(1), normalizer="none")
    >>> o.flatten().tolist()
    [1.0, 2.0, 3.0]
    """
    if chunk_size < SHORTEST or chunk_size % SHORTEST:
        raise ValueError(f"chunk_size must be a positive multiple of {SHORTEST}, got {chunk_size}")
    decay = log_decay.expand(q.shape[2], write.shape[-1])
    G, b = (None, None) if initial_state is None else initial_state
    tracked = (q, k, v, write, decay, read, G, b)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tracked)
    options = (normalizer, include_self, chunk_size, eps)
    output, _, _, _, G, b = _forward(q, k, v, write, decay, read, G, b, cu_seqlens, *options, keep)
    if not output_final_state:
        return output, None
    return output, RetentionState(G, None if normalizer == "none" else b)


# An operator of torch.library is opaque to torch.compile: no graph break, and no unrolling of the
# loop over segments. Its double backward does not exist and raises.
@torch.library.custom_op("vort::retention_chunk", mutates_args=())
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
    normalizer: str,
    include_self: bool,
    chunk_size: int,
    eps: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output, signed inverse normaliser, G and b kept for the backward pass, final G and b."""
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        options = (normalizer, include_self, chunk_size, eps)
        problem = Problem(q, k, v, write, log_decay, read, G, b, cu_seqlens, *options)
        output, inverse, kept_G, kept_b, final_G, final_b = run_forward(problem, keep)
        final_G = final_G.unflatten(-1, (problem.key_dim, problem.value_dim))
        return output, inverse, kept_G, kept_b, final_G, final_b


@_forward.register_fake
def _forward_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    write: Tensor,
    log_decay: Tensor,
    read: Tensor | None,
    G: Tensor | None,
    b: Tensor | None,
    cu_seqlens: Tensor | None,
    normalizer: str,
    include_self: bool,
    chunk_size: int,
    eps: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    (batch, length, heads, keys), values, terms = q.shape, v.shape[3], write.shape[-1]
    rows = state_terms(normalizer, terms)
    segments = Plan.of(q, v, write, cu_seqlens, chunk_size).max_segments if keep else 0
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = compute_dtype(q, k, v)

    def new(*shape: int) -> Tensor:
        return q.new_empty(shape, dtype=dtype)

    return (
        torch.empty_like(v, memory_format=torch.contiguous_format),
        new(batch, length, heads, 1 if rows else 0),
        new(segments, batch, heads, terms, keys * values),
        new(segments, batch, heads, rows, keys),
        new(sequences, heads, terms, keys, values),
        new(sequences, heads, rows, keys),
    )


@torch.library.custom_op("vort::retention_chunk_backward", mutates_args=())
def _backward(
    grad_output: Tensor,
    grad_G: Tensor | None,
    grad_b: Tensor | None,
    inverse: Tensor,
    kept_G: Tensor,
    kept_b: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    write: Tensor,
    log_decay: Tensor,
    read: Tensor | None,
    G: Tensor | None,
    b: Tensor | None,
    cu_seqlens: Tensor | None,
    normalizer: str,
    include_self: bool,
    chunk_size: int,
    eps: float,
    decay_needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, write, log_decay, read, G and b."""
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        options = (normalizer, include_self, chunk_size, eps, decay_needs_grad)
        problem = Problem(q, k, v, write, log_decay, read, G, b, cu_seqlens, *options)
        grads = run_backward(problem, grad_output, inverse, (kept_G, kept_b), (grad_G, grad_b))
        initial_G = grads.initial[0].unflatten(-1, (problem.key_dim, problem.value_dim))
        decay = grads.log_decay.to(log_decay.dtype)
        return (
            *(grads.q, grads.k, grads.v, grads.write, decay, grads.read),
            *(initial_G, grads.initial[1]),
        )


@_backward.register_fake
def _backward_shapes(
    grad_output: Tensor,
    grad_G: Tensor | None,
    grad_b: Tensor | None,
    inverse: Tensor,
    kept_G: Tensor,
    kept_b: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    write: Tensor,
    log_decay: Tensor,
    read: Tensor | None,
    G: Tensor | None,
    b: Tensor | None,
    cu_seqlens: Tensor | None,
    normalizer: str,
    include_self: bool,
    chunk_size: int,
    eps: float,
    decay_needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    heads, keys, values, terms = q.shape[2], q.shape[3], v.shape[3], write.shape[-1]
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1

    def like(x: Tensor) -> Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def new(*shape: int) -> Tensor:
        return q.new_empty(shape, dtype=compute_dtype(q, k, v))

    return (
        *(like(q), like(k), like(v), like(write), like(log_decay)),
        new(0) if read is None else like(read),
        new(sequences, heads, terms, keys, values),
        new(sequences, heads, state_terms(normalizer, terms), keys),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep the inputs and the little that is needed to start again at each segment."""
    *tensors, normalizer, include_self, chunk_size, eps, _ = inputs
    ctx.save_for_backward(*output[1:4], *tensors)
    ctx.options = (normalizer, include_self, chunk_size, eps)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients for every argument of `_forward`, None for the options."""
    saved = ctx.saved_tensors
    v, read, G, b = saved[5], saved[8], saved[9], saved[10]
    grad_output, _, _, _, grad_G, grad_b = grads
    if grad_output is None:
        grad_output = torch.zeros_like(v)
    q, k, v, write, decay, to_read, to_G, to_b = _backward(
        grad_output, grad_G, grad_b, *saved, *ctx.options, ctx.needs_input_grad[4]
    )
    return (
        *(q, k, v, write, decay),
        None if read is None else to_read,
        None if G is None else to_G.to(G.dtype),
        None if b is None else to_b.to(b.dtype),
        *(None,) * 6,
    )


_forward.register_autograd(_differentiate, setup_context=_save)
