"""Gated linear attention at a few places: what tokens asked for read of S states for each head.

Gates come from r, a narrow projection of the tokens, and are made where they are used: for every
token, state and feature they would be the largest tensor by far. `gated_of_asked_exact` is the
equation, every pair of a place and a token; `triton.py` walks through the sequences on a GPU.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vort.ops.asked import ROWS, Asked

__all__ = ["GatedInputs", "gated_of_asked", "gated_of_asked_exact", "walk_pays"]

# Features, values and rank that the kernels have registers for.
WIDEST, HIGHEST_RANK = 128, 64
# Of so many tokens one may be asked for: a walk stops at each.
STRIDE = 8


class GatedInputs(NamedTuple):
    """Tensors and options.

    q: `[rows, H, S, D]` of the places, as `vort.ops.asked.pick` has them.
    k, v: `[B, T, H, D]` and `[B, T, H, V]`, which all states of a head share.
    r: `[B, T, R]`; weight, bias: `[H S D, R]` and `[H S D]`: a gate is, by its logit w · r + b,
        sigmoid(logit)^(1 / power).
    places: `[N]`, flat places b T + t.
    ones: whether a column of ones stands beside the values.
    tracked: whether gradients will be wanted.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    r: Tensor
    weight: Tensor
    bias: Tensor
    places: Tensor
    power: float
    ones: bool
    tracked: bool


def walk_pays(asked: Asked, features: int, values: int, rank: int) -> bool:
    """Whether `gated_of_asked` is the way for so few places and such sizes."""
    fits = max(features, values) <= WIDEST and rank <= HIGHEST_RANK
    return fits and len(asked.places) * STRIDE <= asked.batch * asked.length


def gated_of_asked(inputs: GatedInputs) -> Tensor:
    """Σ_s q_s G_s at every place, `[rows, H, V]`, or V + 1 with ones; float32, by kernels.

    G_t = diag(a_t) G_{t-1} + k_t v_tᵀ for each state, the place's own token included.
    """
    from .triton import gated_walk

    return gated_walk(inputs)


def gated_of_asked_exact(inputs: GatedInputs) -> Tensor:
    """The same by the definition, in PyTorch: every pair of a place and a token before it."""
    q, k, v, r, weight, bias, places = inputs[:7]
    length, count = k.shape[1], len(places)
    sizes = (q.shape[1], q.shape[2], q.shape[3])
    dtype = torch.promote_types(v.dtype, torch.float32)
    q, k, v, r, weight, bias = (x.to(dtype) for x in (q, k, v, r, weight, bias))
    if inputs.ones:
        v = F.pad(v, (0, 1), value=1.0)
    logits = F.linear(r, weight, bias).unflatten(-1, sizes)
    total = (F.logsigmoid(logits) / inputs.power).cumsum(1)
    row, t = places // max(length, 1), places % max(length, 1)
    lag = total[row, t][:, None] - total[row]
    before = (torch.arange(length, device=k.device) <= t[:, None])[..., None, None, None]
    decay = lag.masked_fill(~before, -torch.inf).exp()
    scores = torch.einsum("nhsd,nihsd,nihd->nhi", q[:count], decay, k[row])
    found = torch.einsum("nhi,nihv->nhv", scores, v[row])
    return F.pad(found, (0, 0, 0, 0, 0, -count % ROWS))
