"""What the kernels of heads are given, and where they write."""

from typing import NamedTuple

import torch
from torch import Tensor

from vort.ops.custom import Tensors
from vort.ops.gpu.launcher import dense

__all__ = ["Inputs", "dense_rows", "empty_heads", "turn_stride"]


class Inputs(NamedTuple):
    """The arguments of `heads_fused` and `heads_step`."""

    x: Tensor
    weight: Tensor | None
    state: Tensor | None
    age: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    q_map: Tensor | None
    k_map: Tensor | None
    num_heads: int
    num_key_value_heads: int
    eps: float
    twice: bool

    @property
    def dim(self) -> int:
        """The size of a head."""
        return self.x.shape[2] // (self.num_heads + 2 * self.num_key_value_heads)

    @property
    def taps(self) -> int:
        """W of the convolution; 1 without one."""
        return 1 if self.weight is None else self.weight.shape[1]

    @property
    def features(self) -> int:
        """Logits of a map; the size of half a head without one."""
        return self.dim // 2 if self.q_map is None else self.q_map.shape[2]


def turn_stride(inputs: Inputs) -> int:
    """A table of angles for each row is as long as the batch."""
    x, cos = inputs.x, inputs.cos
    apart = cos is not None and cos.shape[0] == x.shape[0] * x.shape[1] and x.shape[0] > 1
    return x.shape[1] if apart else 0


def dense_rows(inputs: Inputs) -> Inputs:
    """Dense channels; rows and sequences of x may lie apart."""
    x = inputs.x if inputs.x.stride(-1) == 1 else inputs.x.contiguous()
    return Inputs._make((x, *(dense(t) for t in inputs[1:10]), *inputs[10:]))


def empty_heads(inputs: Inputs) -> Tensors:
    """What `heads_fused` returns, not yet computed; no values again."""
    x, sizes = inputs.x, (inputs.num_heads, *[inputs.num_key_value_heads] * 2)
    q, k, v = (x.new_empty(*x.shape[:2], n, inputs.dim) for n in sizes)
    turned = (torch.empty_like(q), torch.empty_like(k)) if inputs.cos is not None else (None, None)
    if inputs.q_map is not None:
        q, k = (x.new_empty(*x.shape[:2], n, 2 * inputs.features) for n in sizes[:2])
    return q, k, v, *turned, None
