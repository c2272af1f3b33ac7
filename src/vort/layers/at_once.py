"""Whole sequences through a layer of VORT as one differentiable function, where kernels know it.

For training, where asking and telling op by op would take the host longer than kernels take. What
is computed is what `VortAttention` computes.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from vort.layers.parts import RMSNorm
from vort.ops.bounds import ages, sequence_starts
from vort.ops.gpu.together import Together
from vort.ops.linear import WIDEST as WIDEST_ROW
from vort.ops.linear import (
    Norm,
    is_added_to,
    is_plain,
    is_watched,
    multiplied_by_kernels,
    product_type,
)
from vort.ops.retention.interface import KERNEL_SCALES
from vort.ops.short_convolution import LONGEST, WIDEST

if TYPE_CHECKING:
    from vort.layers.vort_attention import VortAttention
    from vort.memories.interface import StepWeights

__all__ = ["attention_at_once"]

# Columns that matrix units can begin at.
ALIGNED = 8
NO_NORM = Norm(None, 1e-6)  # type: ignore[arg-type]


def attention_at_once(
    layer: "VortAttention",
    norm: Norm | None,
    x: Tensor,
    delta: Tensor | None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """x + delta `[B, T, hidden_size]`, the layer's output of its norm, and the orders.

    cu_seqlens: `[N + 1]` bounds of packed sequences, B = 1.

    None where kernels cannot serve this layer: nothing has happened then.
    """
    linears = (layer.q_proj, layer.k_proj, layer.v_proj, layer.g_proj, layer.o_proj)
    if not is_plain(x, *linears):
        return None
    apart = cu_seqlens is not None and (x.shape[0] != 1 or cu_seqlens.device != x.device)
    if apart or (norm is None and delta is not None):
        return None
    memory = layer.memory.step_weights(x)
    weights = [p.weight for p in linears if p is not None]
    if memory is None or not _fits(layer, norm, x, delta, memory, weights):
        return None
    from vort.ops.mixing import LayerInputs, attention_layer
    from vort.ops.short_convolution.triton import turn_table

    conv, gate, dtype = layer.convolution, layer.g_proj, product_type(x)
    first = NO_NORM if norm is None else norm
    q_norm, k_norm, out_norm = (
        NO_NORM if n is None else n.fused() for n in (layer.q_norm, layer.k_norm, layer.norm)
    )
    cos = sin = None
    if layer.window and layer.rope_base is not None:
        cos, sin = turn_table(x.shape[1], layer.head_dim, layer.rope_base, x.device)
    logits = iter(memory.weights)
    biases = (memory.order_bias, memory.write_bias, memory.read_bias, memory.gain_bias)
    tensors = (
        x if norm is not None else x.to(dtype),
        delta,
        first.weight,
        *(p.weight for p in linears[:3]),
        None if gate is None else gate.weight,
        *(None if bias is None else next(logits) for bias in biases),
        None if conv is None else conv.weight,
        q_norm.weight,
        k_norm.weight,
        cos,
        sin,
        memory.q_map,
        memory.k_map,
        *biases,
        memory.mix if layer.window else None,
        memory.polynomials,
        memory.log_decay,
        *_packing(cu_seqlens, x.shape[1]),
        out_norm.weight,
        layer.o_proj.weight,
    )
    sizes = (first.eps, layer.num_heads, q_norm.eps, layer.window)
    rest = (*memory[-4:], out_norm.eps, Together(), dtype)
    total, y, order = attention_layer(LayerInputs._make((*tensors, *sizes, *rest)))
    return (x if norm is None else total), y, order


def _packing(cu_seqlens: Tensor | None, length: int) -> tuple[Tensor | None, ...]:
    """Bounds, how many of its own sequence come before each position, and where that begins."""
    if cu_seqlens is None:
        return None, None, None
    start = sequence_starts(length, cu_seqlens, cu_seqlens.device)
    return cu_seqlens, ages(cu_seqlens, length), start


def _fits(
    layer: "VortAttention",
    norm: Norm | None,
    x: Tensor,
    delta: Tensor | None,
    memory: "StepWeights",
    weights: list[Tensor],
) -> bool:
    """Whether kernels know every part of the layer; weights: its projections'.

    All is of one type; under autocast products are of another than their inputs and weights.
    """
    norms, conv = [layer.q_norm, layer.k_norm, layer.norm], layer.convolution
    if not layer.has_plain_heads or (layer.window and layer.rope_base is None):
        return False
    if layer.norm is not None and (type(layer.norm) is not RMSNorm or is_watched(layer.norm)):
        return False
    if is_watched(layer.memory) or layer.memory.maps is None:
        return False
    if conv is not None and conv.size > LONGEST:
        return False
    given = [memory.q_map, memory.k_map, *memory.weights, *weights]
    given += [p.weight for p in (conv, *norms) if p is not None]
    given += [] if norm is None else [norm.weight]
    sizes = (layer.head_dim, memory.q_map.shape[2])
    columns = (layer.num_heads * layer.head_dim, sum(w.shape[0] for w in memory.weights))
    return (
        multiplied_by_kernels(x, *given)
        and x.shape[2] <= WIDEST_ROW
        and is_added_to(x, delta)
        and max(sizes) <= WIDEST
        and layer.head_dim % 2 == 0
        and memory.log_decay.shape[-1] <= KERNEL_SCALES
        and all(n % ALIGNED == 0 for n in columns)
    )
