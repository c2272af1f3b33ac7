"""One more token through a layer of VORT in four launches, its states moved on where they lie.

For recorded decoding, where a launch costs more than what most of them compute. What is asked of
the layer is asked once, when the step is recorded.
"""

import torch
from torch import Tensor

from vort.layers.cache import LayerStates
from vort.layers.parts import RMSNorm
from vort.layers.vort_attention import VortAttention
from vort.memories import State
from vort.memories.interface import StepWeights
from vort.ops.gpu.launcher import power_of_two
from vort.ops.linear import Norm, few_rows, is_plain, is_watched

__all__ = ["attention_step"]

# What the kernels hold in registers: positions of the convolution, numbers of one scale's state.
LONGEST, LARGEST = 4, 16384


def attention_step(
    layer: VortAttention, norm: Norm, x: Tensor, states: LayerStates
) -> Tensor | None:
    """x + layer(norm(x)) of one token a row `[B, 1, hidden_size]`, `states` moved on in place.

    None where the kernels cannot serve this layer, or these states; nothing has happened then.
    """
    # As they lie, not as they are loaded: in the type they are kept in.
    state = states.states.get(layer.layer_idx)
    memory = layer.memory.step_weights(x)
    if state is None or memory is None or not _fits(layer, x, state, memory):
        return None
    from vort.ops.decoding.heads import HeadsInputs, heads_step
    from vort.ops.decoding.memory import StepInputs, memory_step
    from vort.ops.linear.few import few_products

    projections = [layer.q_proj, layer.k_proj, layer.v_proj]
    gates = [] if layer.g_proj is None else [layer.g_proj]
    weights = [p.weight for p in (*projections, *gates)]
    joined = few_products(x[:, 0], *weights, *memory.weights, norm=norm)
    sizes = [sum(p.out_features for p in part) for part in (projections, gates)]
    projected, gate, logits = joined.split([*sizes, joined.shape[1] - sum(sizes)], 1)
    conv = layer.convolution
    q_norm, k_norm, out_norm = (
        Norm(None, 1e-6) if n is None else n.fused()  # type: ignore[arg-type]
        for n in (layer.q_norm, layer.k_norm, layer.norm)
    )
    seen = state.get("local.seen")
    heads = heads_step(
        HeadsInputs(
            projected,
            memory.q_map,
            memory.k_map,
            layer.num_key_value_heads,
            None if conv is None else state["conv"],
            None if conv is None else conv.weight,
            q_norm.weight,
            k_norm.weight,
            state.get("local.k"),
            state.get("local.v"),
            seen,
            layer.rope_base if layer.window else None,
            q_norm.eps,
        )
    )
    mixed = memory_step(
        heads,
        StepInputs(
            G=state["memory.G"],
            b=state.get("memory.b"),
            logits=logits,
            order_bias=memory.order_bias,
            write_bias=memory.write_bias,
            read_bias=memory.read_bias,
            gain_bias=memory.gain_bias,
            mix=memory.mix,
            polynomials=memory.polynomials,
            log_decay=memory.log_decay,
            order_min=memory.order_min,
            normalizer=memory.normalizer,
            include_self=memory.include_self,
            eps=memory.eps,
            gate=gate if gates else None,
            norm=out_norm.weight,
            norm_eps=out_norm.eps,
            seen=seen,
        ),
    )
    output = few_products(mixed, layer.o_proj.weight, residual=x[:, 0])
    states.store_state(layer.layer_idx, state, 1)
    return output.unsqueeze(1)


def _fits(layer: VortAttention, x: Tensor, state: State, memory: StepWeights) -> bool:
    """Whether kernels know every part of the layer, and its states lie as they want them."""
    linears = (layer.q_proj, layer.k_proj, layer.v_proj, layer.g_proj, layer.o_proj)
    if type(layer) is not VortAttention or not is_plain(x, *linears):
        return False
    if not few_rows(x, *layer.parameters()) or is_watched(*layer.modules()):
        return False
    short = layer.convolution is None or layer.convolution.size <= LONGEST
    features = memory.q_map.shape[-1]
    small = power_of_two(2 * features) * power_of_two(layer.head_dim) <= LARGEST
    normed = layer.has_plain_heads and (layer.norm is None or type(layer.norm) is RMSNorm)
    summed = memory.normalizer == "none" or "memory.b" in state
    known = short and small and normed and summed and layer.head_dim % 2 == 0
    return known and _states_fit(layer, x, state)


def _states_fit(layer: VortAttention, x: Tensor, state: State) -> bool:
    """Dense, of as many rows, and of the types that kernels read and write."""
    if any(not t.is_contiguous() or t.device != x.device for t in state.values()):
        return False
    if any(len(t) != len(x) for t in state.values()):
        return False
    G, b = state["memory.G"], state.get("memory.b")
    # Rounding at random wants a count of positions.
    wide = G.dtype == torch.float32 or (G.dtype == torch.bfloat16 and layer.window > 0)
    narrow = [state[n] for n in ("conv", "local.k", "local.v") if n in state]
    return (
        wide and (b is None or b.dtype == torch.float32) and all(t.dtype == x.dtype for t in narrow)
    )
