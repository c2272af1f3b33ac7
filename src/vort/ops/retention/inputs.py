"""What a call of `retention` is given, and errors that say what was given instead of it."""

from collections.abc import Mapping
from math import inf
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from vort.names import check_choice
from vort.ops.asked import check_places, check_range
from vort.ops.custom import checks_values, traced
from vort.ops.gpu.launcher import debugging, transformed

__all__ = [
    "DEFAULT_EPS",
    "NORMALIZERS",
    "Inputs",
    "Normalizer",
    "b_rows",
    "check_bounds",
    "check_decay",
    "check_decay_shape",
    "check_finite",
    "check_inputs",
    "compute_dtype",
    "count_sequences",
    "wants_grad",
]

Normalizer = Literal["decayed", "undecayed", "none"]
NORMALIZERS: tuple[str, ...] = get_args(Normalizer)

# Products of FAVOR+ features fall to 1e-14 at ordinary lengths, and power-law weights take them
# further down: a customary 1e-6 would erase the answer. float32 holds 1e-20 with room to spare.
DEFAULT_EPS = 1e-20


class Inputs(NamedTuple):
    """A call, packed once and handed on whole: tensors, then options, as `retention` names them.

    G and b are the initial state; tracked: whether a backward pass may follow.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    write: Tensor
    log_decay: Tensor
    read: Tensor | None = None
    G: Tensor | None = None
    b: Tensor | None = None
    cu_seqlens: Tensor | None = None
    asked: Tensor | None = None
    normalizer: str = "decayed"
    include_self: bool = True
    eps: float = DEFAULT_EPS
    output_final_state: bool = False
    chunk_size: int | None = None
    tracked: bool = True


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype of states and sums: float64 where any input is float64, else float32.

    >>> compute_dtype(torch.zeros(1, dtype=torch.bfloat16))
    torch.float32
    """
    wide = any(x is not None and x.dtype == torch.float64 for x in tensors)
    return torch.float64 if wide else torch.float32


def b_rows(normalizer: str, num_scales: int) -> int:
    """How many rows per head b has: one for each scale, or a single undecayed one.

    >>> b_rows("decayed", 8), b_rows("undecayed", 8), b_rows("none", 8)
    (8, 1, 0)
    """
    return {"decayed": num_scales, "undecayed": 1, "none": 0}[normalizer]


def count_sequences(inputs: Inputs) -> int:
    """How many states a call has: one for each row, or for each packed sequence."""
    cu_seqlens = inputs.cu_seqlens
    return inputs.k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def wants_grad(*tensors: Tensor | None) -> bool:
    """Whether a backward pass may follow."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def check_inputs(inputs: Inputs) -> None:
    """Raise ValueError unless shapes fit together; values too, where looking costs no wait.

    Values are looked at on the CPU always, on a GPU under `VORT_DEBUG=1` alone (reading one stops
    the queue), and never while tracing: there whoever reads bounds on the host checks them. NaN and
    infinity are looked for under `VORT_DEBUG=1`.
    """
    check_choice("normalizer", inputs.normalizer, NORMALIZERS)
    _check_shapes(inputs)
    _check_packing(inputs)
    if inputs.asked is not None:
        check_places(inputs.asked)
    _check_state(inputs)
    if traced(inputs.q):
        return
    looks = checks_values(inputs.q)
    if looks and inputs.cu_seqlens is not None:
        check_bounds(inputs.cu_seqlens.tolist(), inputs.q.shape[1])
    if transformed():  # what stands for a whole batch of numbers has no truth of its own
        return
    if looks:
        check_decay(inputs.log_decay)
        if inputs.asked is not None:
            check_range(inputs.asked, inputs.q.shape[0] * inputs.q.shape[1])
    if debugging():
        fields = inputs._asdict().items()
        named = {f"initial_state.{n}" if n in "Gb" else n: x for n, x in fields}
        check_finite({n: x for n, x in named.items() if isinstance(x, Tensor)})


def _check_shapes(inputs: Inputs) -> None:
    q, k, v, write, log_decay, read, *_ = inputs
    if q.dim() != 4:
        raise ValueError(f"q must be [B, T, H, K], got {list(q.shape)}")
    if k.shape != q.shape:
        raise ValueError(f"k must have the shape of q {list(q.shape)}, got {list(k.shape)}")
    for name, x, last in (("v", v, "V"), ("write", write, "S"), ("read", read, "S")):
        if x is not None and (x.dim() != 4 or x.shape[:3] != q.shape[:3]):
            allowed = ", ".join(str(size) for size in q.shape[:3])
            raise ValueError(f"{name} must be [{allowed}, {last}], got {list(x.shape)}")
    heads, num_scales = q.shape[2], write.shape[-1]
    for name, x, axis, size in (("q", q, 2, "H"), ("q", q, 3, "K"), ("v", v, 3, "V")):
        if x.shape[axis] == 0:
            raise ValueError(f"{name} must have {size} >= 1, got {list(x.shape)}")
    if num_scales == 0:
        raise ValueError("write must have at least one scale, got S = 0")
    if read is not None and read.shape != write.shape:
        raise ValueError(
            f"read must have write's shape {list(write.shape)}, got {list(read.shape)}"
        )
    check_decay_shape(log_decay, heads, num_scales, "(S or H, S of write)")
    for name, x in (("q", q), ("k", k), ("v", v), ("write", write), ("log_decay", log_decay)):
        if not x.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")


def check_decay_shape(log_decay: Tensor, heads: int, num_scales: int, why: str) -> None:
    """Raise unless it is [S] or [H, S]."""
    if log_decay.shape not in ((num_scales,), (heads, num_scales)):
        raise ValueError(
            f"log_decay must be [{num_scales}] or [{heads}, {num_scales}] {why}, "
            f"got {list(log_decay.shape)}"
        )


def _check_packing(inputs: Inputs) -> None:
    q, cu_seqlens = inputs.q, inputs.cu_seqlens
    if cu_seqlens is None:
        return
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(
            f"cu_seqlens must be a tensor [N + 1] of integers, got {type(cu_seqlens).__name__}"
        )
    if q.shape[0] != 1:
        raise ValueError(
            f"cu_seqlens packs all sequences into one row: q must have B = 1, got {q.shape[0]}"
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens must be [N + 1] with N >= 1, got {list(cu_seqlens.shape)}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")


def check_bounds(bounds: list[int], length: int) -> None:
    """Raise ValueError unless bounds of packed sequences run from 0 to `length` and never fall."""
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


def _check_state(inputs: Inputs) -> None:
    G, b, normalizer = inputs.G, inputs.b, inputs.normalizer
    if G is None:
        if b is not None:
            raise ValueError("initial_state.G must be a tensor beside b, got None")
        return
    lead, num_scales = (count_sequences(inputs), inputs.q.shape[2]), inputs.write.shape[-1]
    keys, values = inputs.q.shape[3], inputs.v.shape[3]
    if G.shape != (*lead, num_scales, keys, values):
        allowed = [*lead, num_scales, keys, values]
        raise ValueError(f"initial_state.G must be {allowed} (N, H, S, K, V), got {list(G.shape)}")
    rows = b_rows(normalizer, num_scales)
    if rows == 0:
        if b is not None:
            raise ValueError("initial_state.b must be None with normalizer 'none', got a tensor")
        return
    if b is None or b.shape != (*lead, rows, keys):
        given = None if b is None else list(b.shape)
        raise ValueError(
            f"initial_state.b must be {[*lead, rows, keys]} with normalizer {normalizer!r}, "
            f"got {given}"
        )


def check_decay(log_decay: Tensor) -> None:
    """Raise unless all are finite and at most 0."""
    rates = log_decay.detach()
    low, high = (x.item() for x in rates.aminmax())
    if high <= 0 and low > -inf:  # NaN fails both
        return
    index = (~(rates <= 0) | (rates == -inf)).nonzero()[0].tolist()
    value = float(rates[tuple(index)])
    if value == -inf:
        # Over no steps at all a state loses nothing, and 0 times infinity is NaN.
        raise ValueError(
            f"log_decay must be finite, got -inf at index {index}; -1e4 forgets at once"
        )
    raise ValueError(f"log_decay must be <= 0, got {value:g} at index {index}")


def check_finite(tensors: Mapping[str, Tensor | None]) -> None:
    """Under `VORT_DEBUG=1`, raise ValueError where there is NaN or infinity, by the name."""
    if torch.compiler.is_compiling() or not debugging() or transformed():
        return
    for name, x in tensors.items():
        if x is not None and not traced(x) and not bool(torch.isfinite(x).all()):
            index = (~torch.isfinite(x)).nonzero()[0].tolist()
            value = float(x[tuple(index)])
            raise ValueError(f"{name} must be finite, got {value} at index {index} (VORT_DEBUG=1)")
