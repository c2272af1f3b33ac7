"""What memories share whose decay is chosen by the token: one call for all ops, ours in chunks.

Their ops are flash-linear-attention's where it is installed, tensors are on a GPU and its kernels
can be trusted there, and ours in PyTorch elsewhere; both are called alike.
"""

import importlib
import importlib.util
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vort.memories.interface import MemoryInputs, State
from vort.ops.custom import without_autocast
from vort.ops.local_attention.checks import check_cu_seqlens
from vort.ops.retention.inputs import check_bounds

__all__ = [
    "BLOCK",
    "call_op",
    "carried",
    "each_sequence",
    "fla_kernels",
    "one_step",
    "scalar_gates_train",
]

CHUNK, BLOCK = 64, 16

# Tensors `[B, H, chunks, chunk, ·]`, queries, keys and values first, and a state `[B, H, D, V]`, to
# outputs like the values and the state after them.
Recurrence = Callable[..., tuple[Tensor, Tensor]]


def call_op(
    op: Callable[..., tuple[Tensor, Tensor | None]],
    tensors: tuple[Tensor, ...],
    inputs: MemoryInputs,
    state: State | None,
    output_state: bool,
    *,
    scale: float,
    **gates: Tensor,
) -> tuple[Tensor, State | None]:
    """What an op retrieves with tensors `[B, T, H, ·]`, and the state after it, if asked for.

    One token alone is `one_step`, whatever the op: the same few launches every time.
    """
    before = None if state is None else state["G"]
    after: Tensor | None
    if tensors[0].shape[1] == 1 and inputs.cu_seqlens is None:
        output, after = one_step(*tensors, **gates, scale=scale, state=before)
        return output, {"G": after} if output_state else None
    output, after = op(
        *tensors,
        **gates,
        scale=scale,
        initial_state=before,
        output_final_state=output_state,
        cu_seqlens=inputs.cu_seqlens,
    )
    return output, None if after is None else {"G": after}


def one_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    *,
    scale: float,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o = scale q G with G = e^g G_before + k vᵀ, and G, for one token.

    Shapes: q, k `[B, 1, H, D]`, v `[B, 1, H, V]`, g like k or `[B, 1, H]`, beta `[B, 1, H]`; o like
    v, in float32 at least; states `[B, H, D, V]`, None: zeros. With beta the value that k finds in
    e^g G_before is replaced: v becomes beta (v - k e^g G_before).
    """
    _check_state("state", state, q, v, q.shape[0])
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    with without_autocast(q):
        q, k, v, g = (x[:, 0].to(dtype) for x in (q, k, v, g))
        kept = q.new_zeros(*q.shape, v.shape[-1]) if state is None else state.to(dtype)
        kept = kept * (g if g.dim() == 3 else g.unsqueeze(-1)).exp().unsqueeze(-1)
        if beta is not None:
            found = (k.unsqueeze(-2) @ kept).squeeze(-2)
            v = beta[:, 0].to(dtype).unsqueeze(-1) * (v - found)
        after = kept + k.unsqueeze(-1) * v.unsqueeze(-2)
        return scale * (q.unsqueeze(-2) @ after).squeeze(-2).unsqueeze(1), after


def fla_kernels(q: Tensor, module: str) -> Any:
    """flash-linear-attention's module of ops, such as "fla.ops.gla", if it runs for tensors like q.

    None: the tensors are on no GPU, or it is not installed.
    """
    if q.device.type != "cuda" or importlib.util.find_spec("fla") is None:
        return None
    return importlib.import_module(module)


def scalar_gates_train(q: Tensor) -> bool:
    """Whether flash-linear-attention has gradients of gates for a token and head, for such a q.

    It refuses them on Hopper with Triton 3.4 to 3.7.0, which computed them wrong (its issue 640).
    """
    import triton

    version = tuple(int(x) for x in re.findall(r"\d+", triton.__version__)[:3])
    hopper = torch.cuda.get_device_capability(q.device)[0] == 9
    return not (hopper and (3, 4) <= version < (3, 7, 1))


def each_sequence(
    run: Recurrence,
    tensors: tuple[Tensor, ...],
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """A recurrence of whole sequences, called as flash-linear-attention's ops are.

    Args:
        run: outputs and the last state from the tensors in chunks and the state before.
        tensors: `[B, T, H, ·]`, queries, keys and values first; widened to float32 at least.
        scale: of the queries.
        initial_state: `[N, H, D, V]`.
        output_final_state: whether the last states are wanted.
        cu_seqlens: `[N + 1]` bounds of packed sequences, B = 1; they are read, on a GPU too.
    """
    _check(tensors, initial_state, cu_seqlens)
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    q, *rest = (x.to(dtype) for x in tensors)
    with without_autocast(q):
        if cu_seqlens is None:
            o, state = _over_chunks(run, [q * scale, *rest], initial_state)
            return o, state if output_final_state else None
        o, state = _packed(run, [q * scale, *rest], initial_state, cu_seqlens.tolist())
        return o, state if output_final_state else None


def _check(
    tensors: tuple[Tensor, ...], initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    """Refuse tensors, a state and bounds that do not go together; bounds are looked at later."""
    q, _, v, *_ = tensors
    if any(x.shape[:3] != q.shape[:3] for x in tensors):
        raise ValueError(
            "q, k, v and gates must have the same [B, T, H], got "
            f"{', '.join(str(list(x.shape[:3])) for x in tensors)}"
        )
    check_cu_seqlens(cu_seqlens, *q.shape[:2], values=False)
    count = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    _check_state("initial_state", initial_state, q, v, count)


def _check_state(name: str, state: Tensor | None, q: Tensor, v: Tensor, count: int) -> None:
    wanted = (count, q.shape[2], q.shape[3], v.shape[3])
    if state is not None and state.shape != wanted:
        raise ValueError(
            f"{name} must be {list(wanted)} (N, H, D, V) to go with q and v, "
            f"got {list(state.shape)}"
        )


def _packed(
    run: Recurrence, tensors: list[Tensor], initial_state: Tensor | None, bounds: list[int]
) -> tuple[Tensor, Tensor]:
    """Sequences packed into one row: those of as many chunks side by side, filled up with zeros.

    Hundreds of short ones, one after the other, would keep a GPU waiting for their launches.
    """
    if not torch.compiler.is_compiling():
        check_bounds(bounds, tensors[0].shape[1])
    groups: dict[int, list[int]] = {}
    for index, (start, stop) in enumerate(pairwise(bounds)):
        groups.setdefault(_filled(stop - start), []).append(index)
    device = tensors[0].device
    # A row of zeros at the end is what every place beyond a sequence stands for.
    rows = [torch.cat([x[0], x.new_zeros(1, *x.shape[2:])]) for x in tensors]
    outputs, states, places = [], [], []
    for length, members in groups.items():
        steps = torch.arange(length, device=device)
        starts, stops = (
            torch.tensor([bounds[index + n] for index in members], device=device)[:, None]
            for n in (0, 1)
        )
        place = starts + steps
        inside = place < stops
        before = None if initial_state is None else initial_state[members]
        taken = [x[place.masked_fill(~inside, len(x) - 1)] for x in rows]
        o, state = _over_chunks(run, taken, before)
        outputs.append(o[inside])
        places.append(place[inside])
        states.append(state)
    order = torch.cat(places).argsort()
    back = torch.tensor([index for members in groups.values() for index in members]).argsort()
    return torch.cat(outputs)[order][None], torch.cat(states)[back.to(device)]


def _filled(length: int) -> int:
    """The length of a sequence in whole chunks."""
    chunk = min(CHUNK, -(-length // BLOCK) * BLOCK)
    return -(-length // chunk) * chunk if length else 0


def _over_chunks(
    run: Recurrence, tensors: list[Tensor], state: Tensor | None
) -> tuple[Tensor, Tensor]:
    q, _, v = tensors[:3]
    batch, length, heads, dim = q.shape
    if state is None:
        state = q.new_zeros(batch, heads, dim, v.shape[-1])
    state = state.to(q.dtype)
    if length == 0:
        return torch.zeros_like(v), state
    o, state = run(*_in_chunks(tensors), state)
    return o.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :length], state


def _in_chunks(tensors: list[Tensor]) -> list[Tensor]:
    """Tensors `[B, T, H, ·]` as `[B, H, chunks, chunk, ·]`, zeros behind the last step.

    A step of zeros has gate 1 and no key, so it changes nothing.
    """
    length = tensors[0].shape[1]
    chunk = min(CHUNK, -(-length // BLOCK) * BLOCK)
    tail = -length % chunk
    return [
        F.pad(x, (0, 0, 0, 0, 0, tail)).unflatten(1, (-1, chunk)).permute(0, 3, 1, 2, 4)
        for x in tensors
    ]


def carried(state: Tensor, kept: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """The states that chunks begin with, `[B, H, chunks, D, V]`, and the one after the last.

    Args:
        state: `[B, H, D, V]`, what the first chunk begins with.
        kept: `[B, H, chunks, D or 1, 1]`, the share of it that a chunk leaves.
        added: `[B, H, chunks, D, V]`, what a chunk adds.
    """
    starts = []
    for share, written in zip(kept.unbind(2), added.unbind(2), strict=True):
        starts.append(state)
        state = state * share + written
    return torch.stack(starts, 2), state
