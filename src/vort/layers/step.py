"""One more token through a layer of VORT in four launches, its states moved on where they lie.

For recorded decoding, where a launch costs more than what most of them compute. What is asked of
the layer is asked once, when the step is recorded.
"""

import torch
from torch import Tensor, nn

from vort.layers.cache import LayerStates
from vort.layers.parts import RMSNorm
from vort.layers.vort_attention import VortAttention
from vort.memories import State
from vort.memories.interface import StepWeights
from vort.ops.gpu.launcher import power_of_two
from vort.ops.linear import few_rows, is_plain

__all__ = ["attention_step", "is_plain_norm"]

# What the kernels hold in registers: positions of the convolution, numbers of one scale's state.
LONGEST, LARGEST = 4, 16384


def attention_step(
    layer: VortAttention, norm: RMSNorm, x: Tensor, states: LayerStates
) -> Tensor | None:
    """x + layer(norm(x)) of one token a row `[B, 1, hidden_size]`, `states` moved on in place.

    None where the kernels cannot serve this layer, or these states; nothing has happened then.
    """
    # As they lie, not as they are loaded: in the type they are kept in.
    state = states.states.get(layer.layer_idx)
    memory = layer.memory.step_weights(x)
    if state is None or memory is None or not _fits(layer, norm, x, state, memory):
        return None
    from vort.ops.decoding.heads import HeadsInputs, heads_step
    from vort.ops.decoding.memory import MemoryInputs, memory_step
    from vort.ops.linear.few import few_products

    projections = [layer.q_proj, layer.k_proj, layer.v_proj]
    gates = [] if layer.g_proj is None else [layer.g_proj]
    weights = [p.weight for p in (*projections, *gates)]
    joined = few_products(x[:, 0], *weights, *memory.weights, norm=norm.weight, eps=norm.eps or 0.0)
    sizes = [sum(p.out_features for p in part) for part in (projections, gates)]
    projected, gate, logits = joined.split([*sizes, joined.shape[1] - sum(sizes)], 1)
    q_norm, k_norm, conv, out_norm = layer.q_norm, layer.k_norm, layer.convolution, layer.norm
    seen = state.get("local.seen")
    heads = heads_step(
        HeadsInputs(
            projected,
            memory.q_map,
            memory.k_map,
            layer.num_key_value_heads,
            None if conv is None else state["conv"],
            None if conv is None else conv.weight,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            state.get("local.k"),
            state.get("local.v"),
            seen,
            layer.rope_base if layer.window else None,
            1e-6 if q_norm is None or q_norm.eps is None else q_norm.eps,
        )
    )
    mixed = memory_step(
        heads,
        MemoryInputs(
            state["memory.G"],
            state.get("memory.b"),
            logits,
            *memory[3:],
            gate=gate if gates else None,
            norm=None if out_norm is None else out_norm.weight,
            norm_eps=0.0 if out_norm is None or out_norm.eps is None else out_norm.eps,
            seen=seen,
        ),
    )
    output = few_products(mixed, layer.o_proj.weight, residual=x[:, 0])
    states.store_state(layer.layer_idx, state, 1)
    return output.unsqueeze(1)


def is_plain_norm(norm: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a norm's weight may be used past the module."""
    plain = type(norm) is RMSNorm and norm.eps is not None and norm.weight.dtype == dtype
    return plain and not (norm._forward_hooks or norm._forward_pre_hooks)


def _fits(
    layer: VortAttention, norm: RMSNorm, x: Tensor, state: State, memory: StepWeights
) -> bool:
    """Whether kernels know every part of the layer, and its states lie as they want them."""
    linears = (layer.q_proj, layer.k_proj, layer.v_proj, layer.g_proj, layer.o_proj)
    norms = [n for n in (norm, layer.q_norm, layer.k_norm, layer.norm) if n is not None]
    if type(layer) is not VortAttention or not is_plain(x, *linears):
        return False
    if not all(is_plain_norm(n, x.dtype) for n in norms) or not few_rows(x, *layer.parameters()):
        return False
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in layer.modules())
    conv = layer.convolution
    short = conv is None or conv.size <= LONGEST
    features = memory.q_map.shape[-1]
    small = power_of_two(2 * features) * power_of_two(layer.head_dim) <= LARGEST
    even = layer.head_dim % 2 == 0
    summed = memory.normalizer == "none" or "memory.b" in state
    known = short and small and even and summed
    return known and not hooked and _states_fit(layer, x, state)


def _states_fit(layer: VortAttention, x: Tensor, state: State) -> bool:
    """Dense, and of the types that kernels read and write."""
    if any(not t.is_contiguous() or t.device != x.device for t in state.values()):
        return False
    G, b = state["memory.G"], state.get("memory.b")
    # Rounding at random wants a count of positions.
    wide = G.dtype == torch.float32 or (G.dtype == torch.bfloat16 and layer.window > 0)
    narrow = [state[n] for n in ("conv", "local.k", "local.v") if n in state]
    return (
        wide and (b is None or b.dtype == torch.float32) and all(t.dtype == x.dtype for t in narrow)
    )
