"""`retention`: one signature, checked arguments, and the backend that suits the machine."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from vort.names import check_choice
from vort.ops.custom import without_autocast
from vort.ops.gpu.launcher import has_triton, kernels_take, require_kernels, transformed
from vort.ops.retention.chunk import retention_chunk
from vort.ops.retention.chunk.layout import SHORTEST
from vort.ops.retention.exact import retention_exact
from vort.ops.retention.groups import retention_in_groups
from vort.ops.retention.inputs import (
    DEFAULT_EPS,
    Inputs,
    Normalizer,
    check_inputs,
    wants_grad,
)
from vort.ops.retention.recurrent import retention_recurrent
from vort.ops.retention.state import RetentionState

__all__ = ["BACKENDS", "Backend", "explain_backend", "retention"]

Backend = Literal["auto", "exact", "recurrent", "chunk", "triton"]
BACKENDS: tuple[str, ...] = get_args(Backend)

logger = logging.getLogger(__name__)

# Measured on a CPU: a few steps cost less than setting up one chunk.
_FEW_TOKENS = 4
# Scales that the GPU kernels take in one call.
KERNEL_SCALES = 32


def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    write: Tensor,
    log_decay: Tensor,
    *,
    read: Tensor | None = None,
    normalizer: Normalizer = "decayed",
    include_self: bool = True,
    initial_state: RetentionState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
    chunk_size: int | None = None,
    eps: float = DEFAULT_EPS,
    asked: Tensor | None = None,
) -> tuple[Tensor, RetentionState | None]:
    """Values retrieved from a memory of S scales `[B, T, H, V]`, and its state if asked for.

        o_t = sum_s read[t,s] sum_{i<=t} exp(log_decay[s] (t-i)) write[i,s] (q_t . k_i) v_i / n_t

    Args:
        q: queries, features applied, `[B, T, H, K]`.
        k: keys, likewise.
        v: values `[B, T, H, V]`; the output has their dtype.
        write: how much each token writes to each scale, `[B, T, H, S]`.
        log_decay: log of what remains after one step, `[S]` or `[H, S]`, at most 0 and finite.
        read: how much each query reads of each scale, `[B, T, H, S]`; None reads all alike.
        normalizer: what n_t is. "decayed": the same double sum with v_i = 1 (eq. b-rec);
            "undecayed": sum_i q_t . k_i (eq. keyed-retrieval); "none": 1. The division is by
            |n_t| + eps.
        include_self: whether t sees itself (i <= t) or only the past (i < t).
        initial_state: what a former call returned; its last token is the one before token 0.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: bounds of packed sequences `[N + 1]`, from 0 to T, when B = 1; equal
            neighbours are an empty sequence. States then hold N entries.
        backend: "auto" asks `explain_backend`; "exact" is quadratic, "recurrent" goes token by
            token, "chunk" is the parallel form, "triton" its GPU kernels.
        chunk_size: tokens in a chunk, a multiple of 16, for the two backends that have chunks:
            "chunk" (None: 64) and "triton" (None: by shape; rounded up to a power of two, in
            bfloat16 to at least 128). "auto" takes one of them if it is given.
        eps: eps_0 of eq. keyed-retrieval; take about 1e-6 for features of either sign, whose
            normaliser can come near zero.
        asked: `[N]`, flat places b T + t of the only outputs that anybody will look at, in any
            order; one that comes twice counts once. The GPU kernels then leave out others, whose
            outputs are 0: all of them where places are few and no state comes or goes, else blocks
            of positions without a place. Gradients must be 0 there, as they are where nobody looks.
            Places that lie in no sequence are refused, but on a GPU, where asking would mean
            waiting: there they count for nothing, or stop the device.

    Sums and states are float32, float64 for float64 inputs, whatever autocast says. Gradients flow
    to every tensor argument and to the initial state.

    >>> q = k = torch.rand(1, 100, 2, 16)
    >>> v = torch.randn(1, 100, 2, 32)
    >>> write = torch.rand(1, 100, 2, 8)
    >>> log_decay = -torch.logspace(-3, 0, 8)
    >>> o, state = retention(q, k, v, write, log_decay, output_final_state=True)
    >>> o.shape, state.G.shape
    (torch.Size([1, 100, 2, 32]), torch.Size([1, 2, 8, 16, 32]))
    >>> more, _ = retention(q, k, v, write, log_decay, initial_state=state)
    """
    if initial_state is not None and not isinstance(initial_state, tuple):
        raise TypeError(
            f"initial_state must be a RetentionState of G and b, got {type(initial_state).__name__}"
        )
    G, b = (None, None) if initial_state is None else initial_state
    tensors = (q, k, v, write, log_decay, read, G, b)
    options = (normalizer, include_self, eps, output_final_state, chunk_size, wants_grad(*tensors))
    inputs = Inputs(*tensors, cu_seqlens, asked, *options)
    check_inputs(inputs)
    chosen, reason = _choose(backend, q, cu_seqlens, chunk_size, inputs.tracked)
    if not torch.compiler.is_compiling() and logger.isEnabledFor(logging.DEBUG):
        logger.debug("retention: %s (%s)", chosen, reason.format(length=q.shape[1]))
    if chosen == "triton":  # kernels know nothing of autocast
        return _load(chosen, inputs)(inputs)
    with without_autocast(q):
        return _load(chosen, inputs)(inputs)


def explain_backend(
    q: Tensor, *, cu_seqlens: Tensor | None = None, backend: Backend = "auto"
) -> str:
    """The backend that `retention` takes for these arguments, and why, as one line.

    >>> explain_backend(torch.zeros(1, 100, 2, 16))
    'chunk: no GPU, 100 tokens'
    """
    chosen, reason = _choose(backend, q, cu_seqlens, None, wants_grad(q))
    return f"{chosen}: {reason.format(length=q.shape[1])}"


def _choose(
    backend: str, q: Tensor, cu_seqlens: Tensor | None, chunk_size: int | None, tracked: bool
) -> tuple[str, str]:
    """Name of the backend and the reason for it.

    The reason names the length as `{length}`, unformatted: a string made from a length would have
    torch.compile make a graph for each.
    """
    check_choice("backend", backend, BACKENDS)
    if chunk_size is not None:
        if backend in ("exact", "recurrent"):
            raise ValueError(f"chunk_size must be None for backend {backend!r}, got {chunk_size}")
        if isinstance(chunk_size, float):
            raise TypeError(f"chunk_size must be a whole number, got {chunk_size!r}")
        if chunk_size < SHORTEST or chunk_size % SHORTEST:
            raise ValueError(
                f"chunk_size must be a positive multiple of {SHORTEST}, got {chunk_size}"
            )
    if backend != "auto":
        return backend, "asked for"
    if transformed():
        return "exact", "torch.func takes PyTorch's own ops"
    # In a traced program a length may stand for many: only a single token is known to be one.
    few = 1 if torch.compiler.is_compiling() else _FEW_TOKENS
    if cu_seqlens is None and chunk_size is None and q.shape[1] <= few:
        if q.shape[1] == 1 and not tracked and kernels_take(q):
            return "triton", "one token on a GPU with Triton"
        return "recurrent", "{length} tokens, as in decoding"
    if q.device.type != "cuda":
        return "chunk", "no GPU, {length} tokens"
    if q.dtype not in (torch.bfloat16, torch.float32):
        return "chunk", f"{str(q.dtype).removeprefix('torch.')} is beyond the GPU kernels"
    if not has_triton():
        return "chunk", "a GPU, but Triton is not installed"
    if not kernels_take(q):
        return "chunk", "a GPU, but kernels are switched off"
    return "triton", "a GPU with Triton, {length} tokens"


def _load(backend: str, inputs: Inputs) -> Callable[[Inputs], tuple[Tensor, RetentionState | None]]:
    """The function behind a name; Triton is imported here, on first use, and nowhere else."""
    if backend != "triton":
        functions = {
            "exact": retention_exact,
            "recurrent": retention_recurrent,
            "chunk": retention_chunk,
        }
        return functions[backend]
    require_kernels(inputs.q.device, "chunk")
    from vort.ops.retention.triton import pairs_pay, retention_decode, retention_triton

    single = inputs.q.shape[1] == 1 and inputs.cu_seqlens is None and inputs.chunk_size is None
    if single and not inputs.tracked:
        return retention_decode
    if inputs.write.shape[-1] > KERNEL_SCALES and not pairs_pay(inputs):
        return partial(_in_groups, retention_triton)
    return retention_triton


def _in_groups(
    kernels: Callable[[Inputs], tuple[Tensor, RetentionState | None]], inputs: Inputs
) -> tuple[Tensor, RetentionState | None]:
    """More scales than kernels take. Places are not passed on: groups are summed everywhere."""
    return retention_in_groups(kernels, KERNEL_SCALES, inputs._replace(asked=None))
