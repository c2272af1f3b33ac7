"""What the kernels of heads are given, and where they write."""

from typing import NamedTuple

from torch import Tensor

from vort.ops.custom import Tensors
from vort.ops.gpu.launcher import dense

__all__ = ["Inputs", "dense_rows", "empty_heads", "empty_pair", "turn_stride"]


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
    x, dim, wide = inputs.x, inputs.dim, inputs.dim
    if inputs.q_map is not None:
        wide = 2 * inputs.features
    q, k = empty_pair(inputs, wide)
    v = x.new_empty(*x.shape[:2], inputs.num_key_value_heads, dim)
    turned = (None, None) if inputs.cos is None else empty_pair(inputs, dim)
    return q, k, v, *turned, None


def empty_pair(inputs: Inputs, width: int) -> tuple[Tensor, Tensor]:
    """Queries and keys, not yet computed, of heads of this width."""
    x = inputs.x
    lead = x.shape[:2]
    return (
        x.new_empty(*lead, inputs.num_heads, width),
        x.new_empty(*lead, inputs.num_key_value_heads, width),
    )
