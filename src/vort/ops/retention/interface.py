"""`retention`: one signature, checked arguments, and the backend that suits the machine."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from vort.ops.gpu.launcher import has_triton, require_kernels
from vort.ops.retention.checks import check_inputs
from vort.ops.retention.chunk import retention_chunk
from vort.ops.retention.exact import retention_exact
from vort.ops.retention.groups import retention_in_groups
from vort.ops.retention.normalizer import DEFAULT_EPS, Normalizer
from vort.ops.retention.recurrent import retention_recurrent
from vort.ops.retention.state import RetentionState

__all__ = ["BACKENDS", "Backend", "explain_backend", "retention"]

Backend = Literal["auto", "exact", "recurrent", "chunk", "triton"]
BACKENDS: tuple[str, ...] = get_args(Backend)

logger = logging.getLogger(__name__)

# Measured on a CPU: a few steps cost less than setting up one chunk.
_FEW_TOKENS = 4
# Time scales that the GPU kernels take in one call.
_KERNEL_SCALES = 32


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
    chunk_size: int = 64,
    eps: float = DEFAULT_EPS,
) -> tuple[Tensor, RetentionState | None]:
    """Values retrieved from a memory of S time scales `[B, T, H, V]`, and its state if asked for.

        o_t = sum_s read[t,s] sum_{i<=t} exp(log_decay[s] (t-i)) write[i,s] (q_t . k_i) v_i / n_t

    Args:
        q: queries, features applied, `[B, T, H, K]`.
        k: keys, likewise.
        v: values `[B, T, H, V]`; the output has their dtype.
        write: how much each token writes to each time scale, `[B, T, H, S]`.
        log_decay: log of what remains after one step, `[S]` or `[H, S]`, at most 0.
        read: how much each query reads of each time scale, `[B, T, H, S]`; None reads all alike.
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
        chunk_size: tokens in a chunk, for "chunk" and "triton".
        eps: eps_0 of eq. keyed-retrieval; take about 1e-6 for features of either sign, whose
            normaliser can come near zero.

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
    check_inputs(q, k, v, write, log_decay, read, normalizer, initial_state, cu_seqlens)
    chosen, reason = _choose(backend, q, cu_seqlens)
    if not torch.compiler.is_compiling():
        logger.debug("retention: %s (%s)", chosen, reason)
    function = _load(chosen, q.device)
    if chosen == "triton" and write.shape[-1] > _KERNEL_SCALES:
        function = partial(retention_in_groups, function, _KERNEL_SCALES)
    with torch.autocast(q.device.type, enabled=False):
        return function(
            q,
            k,
            v,
            write,
            log_decay,
            read=read,
            normalizer=normalizer,
            include_self=include_self,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            chunk_size=chunk_size,
            eps=eps,
        )


def explain_backend(
    q: Tensor, *, cu_seqlens: Tensor | None = None, backend: Backend = "auto"
) -> str:
    """The backend that `retention` takes for these arguments, and why, as one line.

    >>> explain_backend(torch.zeros(1, 100, 2, 16))
    'chunk: no GPU, 100 tokens'
    """
    return ": ".join(_choose(backend, q, cu_seqlens))


def _choose(backend: str, q: Tensor, cu_seqlens: Tensor | None) -> tuple[str, str]:
    """Name of the backend and the reason for it."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend != "auto":
        return backend, "asked for"
    length = q.shape[1]
    if cu_seqlens is None and length <= _FEW_TOKENS:
        return "recurrent", f"{length} tokens, as in decoding"
    if q.device.type != "cuda":
        return "chunk", f"no GPU, {length} tokens"
    if q.dtype not in (torch.bfloat16, torch.float32):
        return "chunk", f"{str(q.dtype).removeprefix('torch.')} is beyond the GPU kernels"
    if not has_triton():
        return "chunk", "a GPU, but Triton is not installed"
    return "triton", f"a GPU with Triton, {length} tokens"


def _load(
    backend: str, device: torch.device
) -> Callable[..., tuple[Tensor, RetentionState | None]]:
    """The function behind a name; Triton is imported here, on first use, and nowhere else."""
    if backend == "triton":
        require_kernels(device, "chunk")
        from vort.ops.retention.triton import retention_triton

        return retention_triton
    return {
        "exact": retention_exact,
        "recurrent": retention_recurrent,
        "chunk": retention_chunk,
    }[backend]
