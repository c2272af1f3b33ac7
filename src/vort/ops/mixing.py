"""A layer of VORT as one differentiable function: the ops it is made of, their kernels in a row.

Called one by one, each op asks whether kernels can take what it is given, tells autograd what it
keeps, and is called back by it. Over a short batch the host takes longer for that than the GPU for
all kernels. Here it is asked and told once a layer; what is computed is the same, launch by launch.

Import this only where it is used: Triton may be absent.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vort.ops.custom import Some, Tensors, custom_op
from vort.ops.gpu.folds import folded_together
from vort.ops.gpu.together import Together
from vort.ops.linear import MOST
from vort.ops.linear.triton import (
    NormInputs,
    ProductInputs,
    gated_norm_back,
    gated_norm_op,
    products_op,
)
from vort.ops.local_attention.block import Inputs as NearInputs
from vort.ops.local_attention.triton.attention import attend_back, attend_op, room_for_dots
from vort.ops.order_weights.triton import RoutingInputs, routing_op
from vort.ops.retention.inputs import Inputs as RetentionInputs
from vort.ops.retention.triton.op import retention_op
from vort.ops.short_convolution.triton import Inputs as HeadsInputs
from vort.ops.short_convolution.triton import heads_op, turned_again

__all__ = ["LayerInputs", "attention_layer"]


class LayerInputs(NamedTuple):
    """What a layer computes with; tensors that are None are left out, and so is what they do.

    Attributes:
        x: hidden states `[B, T, hidden_size]`.
        delta: to be added to them; needs a norm.
        norm: `[hidden_size]` of the norm before all else, with its eps.
        q_weight: `[H D, hidden_size]`, as k_weight, v_weight and the output gate's gate_weight are.
        order_weight: `[H, hidden_size]` of the orders' logits, and likewise write_weight,
            read_weight `[H S, hidden_size]` and gain_weight of one gain a head or a scale.
        conv: `[3 H D, W]` of the short convolution.
        q_norm: `[D]` of the queries' norm, as k_norm of the keys', with heads_eps.
        cos: `[T, D / 2]` of RoPE's angles, as sin: both, where there is a window.
        q_map: `[H, D, M]` of the queries' feature map, as k_map of the keys'.
        order_bias: `[H]` of the orders' logits, as write_bias, read_bias and gain_bias of others.
        mix: `[H, H]`, the orders' weight of the entropies of local attention; needs a window.
        polynomials: `[S, degree + 1]` of the basis, float32.
        log_decay: `[S]`, float32.
        cu_seqlens: `[N + 1]` bounds of packed sequences, B = 1; with it age `[T]`, how many
            positions of its own sequence come before each, and start `[T]`, where it begins.
        out_norm: `[D]` of the heads' norm at the end, with out_eps.
        out_weight: `[hidden_size, H D]`.
        num_heads: H.
        window: of local attention; 0: there is none.
        order_min: the lowest order.
        normalizer: see `retention`, as include_self and retention_eps.
        together: of the products, where their gradients meet.
        dtype: that products are taken in: of all after the first norm but weights, of which any may
            be float32, and the last product's as well. Without that norm it is that of x.
    """

    x: Tensor
    delta: Tensor | None
    norm: Tensor | None
    q_weight: Tensor
    k_weight: Tensor
    v_weight: Tensor
    gate_weight: Tensor | None
    order_weight: Tensor
    write_weight: Tensor | None
    read_weight: Tensor | None
    gain_weight: Tensor | None
    conv: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    q_map: Tensor
    k_map: Tensor
    order_bias: Tensor
    write_bias: Tensor | None
    read_bias: Tensor | None
    gain_bias: Tensor | None
    mix: Tensor | None
    polynomials: Tensor
    log_decay: Tensor
    cu_seqlens: Tensor | None
    age: Tensor | None
    start: Tensor | None
    out_norm: Tensor | None
    out_weight: Tensor
    eps: float
    num_heads: int
    heads_eps: float
    window: int
    order_min: float
    normalizer: str
    include_self: bool
    retention_eps: float
    out_eps: float
    together: Together
    dtype: torch.dtype

    @property
    def heads_weights(self) -> tuple[Tensor, ...]:
        """Of queries, keys and values."""
        return self.q_weight, self.k_weight, self.v_weight

    @property
    def logits_weights(self) -> tuple[Tensor | None, ...]:
        """Of orders, and of gates, read weights and gains."""
        return self.order_weight, self.write_weight, self.read_weight, self.gain_weight

    def products(self) -> ProductInputs:
        """Queries, keys and values; the output gate; all logits."""
        logits = [w for w in self.logits_weights if w is not None]
        gates = [] if self.gate_weight is None else [self.gate_weight]
        weights = [*self.heads_weights, *gates, *logits]
        sizes = (3, *[1] * len(gates), len(logits))
        given = (self.x, self.delta, self.norm, *weights, *[None] * (MOST - len(weights)))
        return ProductInputs._make((*given, self.eps, sizes, self.together, self.dtype))

    def heads(self, projected: Tensor) -> HeadsInputs:
        """Heads of the projections."""
        norms, turn = (self.q_norm, self.k_norm), (self.cos, self.sin)
        given = (projected, self.conv, None, self.age, *norms, *turn, self.q_map, self.k_map)
        return HeadsInputs(*given, self.num_heads, self.num_heads, self.heads_eps, twice=False)

    def near(self, q: Tensor, k: Tensor, v: Tensor) -> NearInputs:
        """Local attention of heads that RoPE has turned."""
        scale = q.shape[-1] ** -0.5
        return NearInputs(q, k, v, self.start, None, self.window, scale, self.mix is not None)

    def routing(self, logits: Tensor, entropy: Tensor | None) -> RoutingInputs:
        """Orders and weights of the logits."""
        biases = (self.order_bias, self.write_bias, self.read_bias, self.gain_bias)
        rest = (entropy, self.mix, self.polynomials, self.order_min)
        return RoutingInputs(logits, *biases, *rest)

    def retention(
        self, q: Tensor, k: Tensor, v: Tensor, write: Tensor, read: Tensor | None
    ) -> RetentionInputs:
        """Retrieval by features."""
        rest = (None, None, self.cu_seqlens, None)
        options = (self.normalizer, self.include_self, self.retention_eps)
        return RetentionInputs(q, k, v, write, self.log_decay, read, *rest, *options)

    def ending(self, found: Tensor, near: Tensor | None, gate: Tensor | None) -> NormInputs:
        """What both found, normed, gated and projected."""
        return NormInputs(found, near, gate, self.out_norm, self.out_weight, self.out_eps)


class _Kept(NamedTuple):
    """What the backward finds: as much as it would of the ops alone."""

    total: Tensor
    order: Tensor
    projected: Tensor
    gate: Tensor | None
    logits: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    taps: Tensor | None
    near: Tensor | None
    entropy: Tensor | None
    sums: Tensor | None
    write: Tensor
    read: Tensor | None
    found: Tensor
    divisor: Tensor | None
    states: Tensor | None
    state_sums: Tensor | None
    wanted: Tensor | None
    joined: Tensor | None


def _forward(inputs: LayerInputs) -> Tensors:
    found: Some = products_op.forward(inputs.products())
    total, projected, gate, joined = found[0], found[2], None, found[-1]
    if inputs.gate_weight is None:
        logits = found[3]
    else:
        gate, logits = found[3:5]
    heads: Some = heads_op.forward(inputs.heads(projected))
    q, k, v, turned_q, turned_k, *_, taps = heads
    near = entropy = sums = None
    if inputs.window:
        near, entropy, sums = attend_op.forward(inputs.near(turned_q, turned_k, v))
    routed: Some = routing_op.forward(inputs.routing(logits, entropy))
    order, write, read = routed
    o, _, _, *kept = retention_op.forward(inputs.retention(q, k, v, write, read))
    (y,) = gated_norm_op.forward(inputs.ending(o, near, gate))  # type: ignore[arg-type]
    heads = (projected, gate, logits, q, k, v, taps, near, entropy, sums, write, read)
    return total, y, order, *heads, o, *kept, joined


@folded_together()
def _backward(inputs: LayerInputs, kept: Some, grads: Some, needs: Sequence[bool]) -> Tensors:
    dtotal, dy, dorder = grads
    c = _Kept._make(kept)
    dy = torch.zeros_like(c.total, dtype=inputs.dtype) if dy is None else dy
    dots = None
    if c.near is not None and c.sums is not None:
        # v stands for q and k, which are of its shape and are not there yet
        dots = room_for_dots(inputs.near(c.v, c.v, c.v), c.sums)
    do, dnear, dgate, dout_norm, dout_weight = gated_norm_back(
        inputs.ending(c.found, c.near, c.gate), (), (dy,), (), dots
    )
    dq, dk, dv, dwrite, _, dread, _, _ = retention_op.backward(
        inputs.retention(c.q, c.k, c.v, c.write, c.read),
        (c.found, c.divisor, c.states, c.state_sums, c.wanted),
        (do, None, None),
        (True, True, True, True, False, True, False, False),
    )
    dlogits, *dbiases, dentropy, dmix = routing_op.backward(
        inputs.routing(c.logits, c.entropy), (c.order,), (dorder, dwrite, dread), ()
    )
    heads = inputs.heads(c.projected)
    dturned: list[Tensor | None] = [None, None, None]
    if c.near is not None:
        # Two tensors that take least to be had again, each as large as the hidden states.
        turned_q, turned_k = turned_again(heads, c.taps)
        near = inputs.near(turned_q, turned_k, c.v)
        came = (dnear, dentropy)
        dturned = list(attend_back(near, (c.near, c.entropy, c.sums), came, (), dots))
    dprojected, dconv, *dheads = heads_op.backward(
        heads, (c.q, c.k, c.taps), (dq, dk, dv, *dturned), ()
    )
    parts = [x for x in (dprojected, dgate, dlogits) if x is not None]
    dx, ddelta, dnorm, *dweights = products_op.backward(
        inputs.products(), (c.total, c.joined), (dtotal, None, *parts), ()
    )
    left = iter(dweights)
    weights = (*inputs.heads_weights, inputs.gate_weight, *inputs.logits_weights)
    spread = [None if w is None else next(left) for w in weights]
    ends = (*dbiases, dmix, dout_norm, dout_weight)
    return dx, ddelta, dnorm, *spread, dconv, *dheads, *ends


_layer = custom_op(
    "vort::attention_layer",
    LayerInputs,
    _forward,
    _backward,
    None,
    outputs=("total", "y", "order"),
    shown=3,
    saved=("total", "order"),
    gradients=(
        "x", "delta", "norm", "q_weight", "k_weight", "v_weight", "gate_weight", "order_weight",
        "write_weight", "read_weight", "gain_weight", "conv", "q_norm", "k_norm", "q_map", "k_map",
        "order_bias", "write_bias", "read_bias", "gain_bias", "mix", "out_norm", "out_weight",
    ),
    forget=("x", "delta"),
)  # fmt: skip


def attention_layer(inputs: LayerInputs) -> tuple[Tensor, Tensor, Tensor]:
    """x + delta, the layer's output of its norm, and the orders `[B, T, H]`, float32.

    Columns of the products must begin at multiples of 8, so that their gradients can meet. Not to
    be traced.
    """
    total, y, order = _layer(inputs)
    return total, y, order
