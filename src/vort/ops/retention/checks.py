"""What `retention` accepts, and errors that say what was given instead."""

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from vort.ops.retention.normalizer import NORMALIZERS
from vort.ops.retention.state import RetentionState, state_terms

__all__ = ["check_inputs", "debugging"]


def debugging() -> bool:
    """Whether the environment asks for costly checks: `VORT_DEBUG=1`.

    >>> import os; os.environ["VORT_DEBUG"] = "1"; debugging()
    True
    >>> del os.environ["VORT_DEBUG"]; debugging()
    False
    """
    return os.environ.get("VORT_DEBUG", "0") not in ("", "0")


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    write: Tensor,
    log_decay: Tensor,
    read: Tensor | None,
    normalizer: str,
    initial_state: RetentionState | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Raise ValueError unless shapes fit together; values too, where looking costs no wait.

    Values are looked at on the CPU always, on a GPU under `VORT_DEBUG=1` alone (reading one stops
    the queue), and never while tracing. NaN and infinity are looked for under `VORT_DEBUG=1`.
    """
    if normalizer not in NORMALIZERS:
        raise ValueError(f"normalizer must be one of {', '.join(NORMALIZERS)}, got {normalizer!r}")
    _check_shapes(q, k, v, write, log_decay, read)
    _check_packing(q, cu_seqlens)
    _check_state(q, v, write, normalizer, initial_state, cu_seqlens)
    if torch.compiler.is_compiling():
        return
    if q.device.type == "cpu" or debugging():
        _check_decay(log_decay)
        if cu_seqlens is not None:
            _check_bounds(cu_seqlens.tolist(), q.shape[1])
    if debugging():
        G, b = (None, None) if initial_state is None else initial_state
        named = {"q": q, "k": k, "v": v, "write": write, "log_decay": log_decay, "read": read}
        _check_finite({**named, "initial_state.G": G, "initial_state.b": b})


def _check_shapes(
    q: Tensor, k: Tensor, v: Tensor, write: Tensor, log_decay: Tensor, read: Tensor | None
) -> None:
    if q.dim() != 4:
        raise ValueError(f"q must be [B, T, H, K], got {list(q.shape)}")
    if k.shape != q.shape:
        raise ValueError(f"k must have the shape of q {list(q.shape)}, got {list(k.shape)}")
    for name, x, last in (("v", v, "V"), ("write", write, "S"), ("read", read, "S")):
        if x is not None and (x.dim() != 4 or x.shape[:3] != q.shape[:3]):
            allowed = ", ".join(str(size) for size in q.shape[:3])
            raise ValueError(f"{name} must be [{allowed}, {last}], got {list(x.shape)}")
    heads, terms = q.shape[2], write.shape[-1]
    if terms == 0:
        raise ValueError("write must have at least one time scale, got S = 0")
    if read is not None and read.shape != write.shape:
        raise ValueError(
            f"read must have write's shape {list(write.shape)}, got {list(read.shape)}"
        )
    if log_decay.shape not in ((terms,), (heads, terms)):
        raise ValueError(
            f"log_decay must be [{terms}] or [{heads}, {terms}] (S or H, S of write), "
            f"got {list(log_decay.shape)}"
        )
    for name, x in (("q", q), ("k", k), ("v", v), ("write", write), ("log_decay", log_decay)):
        if not x.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")


def _check_packing(q: Tensor, cu_seqlens: Tensor | None) -> None:
    if cu_seqlens is None:
        return
    if q.shape[0] != 1:
        raise ValueError(
            f"cu_seqlens packs all sequences into one row: q must have B = 1, got {q.shape[0]}"
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens must be [N + 1] with N >= 1, got {list(cu_seqlens.shape)}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")


def _check_bounds(bounds: list[int], length: int) -> None:
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {bounds[0]}")
    if bounds[-1] != length:
        raise ValueError(f"cu_seqlens must end at T = {length}, got {bounds[-1]}")
    for index in range(1, len(bounds)):
        if bounds[index] < bounds[index - 1]:
            raise ValueError(
                f"cu_seqlens must not decrease, got {bounds[index - 1]} then {bounds[index]} "
                f"at index {index}"
            )


def _check_state(
    q: Tensor,
    v: Tensor,
    write: Tensor,
    normalizer: str,
    state: RetentionState | None,
    cu_seqlens: Tensor | None,
) -> None:
    if state is None:
        return
    G, b = state
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    heads, keys, terms = q.shape[2], q.shape[3], write.shape[-1]
    if G.shape != (sequences, heads, terms, keys, v.shape[3]):
        allowed = [sequences, heads, terms, keys, v.shape[3]]
        raise ValueError(f"initial_state.G must be {allowed} (N, H, S, K, V), got {list(G.shape)}")
    rows = state_terms(normalizer, terms)
    if rows == 0:
        if b is not None:
            raise ValueError("initial_state.b must be None with normalizer 'none', got a tensor")
        return
    if b is None or b.shape != (sequences, heads, rows, keys):
        given = None if b is None else list(b.shape)
        allowed = [sequences, heads, rows, keys]
        raise ValueError(
            f"initial_state.b must be {allowed} with normalizer {normalizer!r}, got {given}"
        )


def _check_decay(log_decay: Tensor) -> None:
    # Written so that NaN fails too.
    wrong = ~(log_decay <= 0)
    if bool(wrong.any()):
        index = wrong.nonzero()[0].tolist()
        value = float(log_decay[tuple(index)])
        raise ValueError(f"log_decay must be <= 0, got {value:g} at index {index}")


def _check_finite(tensors: Mapping[str, Tensor | None]) -> None:
    for name, x in tensors.items():
        if x is not None and not bool(torch.isfinite(x).all()):
            index = (~torch.isfinite(x)).nonzero()[0].tolist()
            value = float(x[tuple(index)])
            raise ValueError(f"{name} must be finite, got {value} at index {index} (VORT_DEBUG=1)")
