"""Tensor parallel over heads: what `tp_plan="auto"` of Transformers does with a VORT model.

A rank has some of the heads: their rows of the projections, of the router, the gates, the rates and
the learned maps, and their columns of the output projection. What heads share (norms of a head, an
order, gates of low rank) and the short convolution, which has queries, keys and values side by
side, is whole on every rank; its gradient is summed. A layer sums its output once, and the gradient
of its input once. The router sees the entropy of all heads, so that is gathered: a number for each
token and head.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vort.layers import VortAttention
from vort.memories import Gates, LayerSettings, Memory
from vort.memories.interface import MemoryInputs
from vort.ops.feature_maps import HedgehogFeatures

__all__ = ["register_styles", "tensor_parallel_plan"]

HEADS, COLUMNS, WHOLE, LAYER = "vort_heads", "vort_columns", "vort_whole", "vort_attention"
_ATTENTION = "layers.*.self_attn"
# Where the parameters of a memory have heads along their first axis; all others are whole.
_GATES = ("gates.write", "gates.read")
_DECAY = ("gate_decay.step", "gate_decay.step_bias", "gate_decay.log_rate")
_MEMORIES: dict[str, tuple[str, ...]] = {
    "vort": tuple(f"router.{name}" for name in ("order", "log_factor", "gate_gain", *_GATES)),
    "exponential": ("log_rate", *_GATES),
    "linear": _GATES,
    "mixture": ("log_rate", "log_weight", "gate_gain", *_GATES),
    "uniform_power_law": _GATES,
    "exact_power_law": _GATES,
    "gla": ("gate_out",),
    "gla_scales": ("gate_out", *_GATES),
    "mamba2": _DECAY,
    "gated_delta": (*_DECAY, "gate_write"),
    "softmax": (),
    "none": (),
}
# Memories that take queries and keys as they are.
_UNMAPPED = ("gla", "mamba2", "gated_delta", "softmax", "none")
_SHARED = {
    "uniform_power_law": ("order_logit",),
    "exact_power_law": ("order_logit",),
    "gla": ("gate_in",),
    "gla_scales": ("gate_in",),
}


def tensor_parallel_plan(settings: LayerSettings) -> dict[str, str] | None:
    """Styles by the names of modules and parameters; None where Transformers has none of them.

    Of a memory that is not among ours the heads stay together: its MLPs are dealt out alone.

    >>> tensor_parallel_plan(LayerSettings())["layers.*.self_attn.memory.router.order"]
    'vort_heads'
    """
    memory, s = settings.memory, settings
    if not _has_styles():
        return None
    mlp = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
    mlp = {f"layers.*.mlp.{name}": style for name, style in mlp.items()}
    mlp["embed_tokens"] = "embedding_rowwise"
    # A plan names modules of all layers at once: layers that differ keep their heads together too,
    # and those whose orders come from the values of all heads.
    differ = any(getattr(s, name, None) for name in ("layer_memories", "layer_settings"))
    if memory not in _MEMORIES or differ or s.order_input == "values":
        return mlp
    several = s.num_scales > 1 and memory not in ("exponential", "linear")
    absent = {
        "gate_gain": s.write_gain == "none",
        "log_factor": not s.learn_basis,
        "gates.write": not s.write_gate,
        "gates.read": not (s.read_weights and (several or s.routing == "banks")),
    }
    own = ["q_proj", "k_proj", "v_proj", *["g_proj"] * s.output_gate]
    there = (x for x in _MEMORIES[memory] if not absent.get(x.removeprefix("router."), False))
    own += [f"memory.{name}" for name in there]
    if s.feature_map == "hedgehog" and memory not in _UNMAPPED:
        own += ["memory.key_map", "memory.query_map"]
    shared = [f"memory.{name}" for name in _SHARED.get(memory, ())]
    if memory == "uniform_power_law" and s.order_per_head:
        own += shared
        shared = []
    shared += ["q_norm", "k_norm"] * s.qk_norm + ["norm"] * s.output_norm
    shared += ["convolution"] * bool(s.conv_size)
    plan = {_ATTENTION: LAYER, f"{_ATTENTION}.o_proj": COLUMNS}
    plan |= {f"{_ATTENTION}.{name}": HEADS for name in own}
    plan |= {f"{_ATTENTION}.{name}": WHOLE for name in shared}
    return plan | mlp


def _has_styles() -> bool:
    """Whether this version of Transformers shards models as it loads them."""
    try:
        from transformers.distributed import tensor_parallel
    except ImportError:
        return False
    return hasattr(tensor_parallel.TensorParallelLayer, "install_forward")


def register_styles() -> None:
    """Tell Transformers the styles that the plan names."""
    if not _has_styles():
        return
    from torch.distributed.tensor import Shard, distribute_tensor
    from transformers.distributed.tensor_parallel import (  # type: ignore[attr-defined]
        ALL_PARALLEL_STYLES,
        TensorParallelLayer,
    )

    class Cut(TensorParallelLayer):  # type: ignore[misc, unused-ignore]
        """A parameter of which each rank has a slice along an axis."""

        def __init__(self, axis: int) -> None:
            self.axis = axis

        def shard_param(self, module: nn.Module, param: str, mesh: Any) -> None:
            whole = module._parameters.get(param)
            if whole is None or (self.axis and whole.ndim == 1):
                return  # the bias of an output is added once
            cut = distribute_tensor(whole, mesh, [Shard(self.axis)], src_data_rank=None)
            module._parameters[param] = nn.Parameter(cut, requires_grad=whole.requires_grad)

        def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
            return module

    class Layer(TensorParallelLayer):  # type: ignore[misc, unused-ignore]
        """An attention layer of some heads."""

        def install_forward(self, module: VortAttention, mesh: Any) -> nn.Module:
            return _of_some_heads(module, mesh)

    class Whole(Cut):
        """A parameter that every rank has, where each knows a part of its gradient."""

        def shard_param(self, module: nn.Module, param: str, mesh: Any) -> None:
            pass

    for name, style in ((HEADS, Cut(0)), (COLUMNS, Cut(1)), (WHOLE, Whole(0)), (LAYER, Layer())):
        ALL_PARALLEL_STYLES.register(name, style)  # type: ignore[arg-type]


def _of_some_heads(layer: VortAttention, mesh: Any) -> VortAttention:
    """The layer, changed in place so that a call computes the heads of this rank."""
    group, rank, ranks = mesh.get_group(), mesh.get_local_rank(), mesh.size()
    heads, kv_heads = layer.num_heads, layer.num_key_value_heads
    for name, count in (("num_attention_heads", heads), ("num_key_value_heads", kv_heads)):
        if count % ranks:
            raise ValueError(f"{name} must be a multiple of the {ranks} ranks, got {count}")
    sizes = [count * layer.head_dim for count in (heads, kv_heads, kv_heads)]
    for part in layer.modules():
        if isinstance(part, VortAttention | Memory | Gates | HedgehogFeatures) and part.num_heads:
            part.num_heads //= ranks
        if isinstance(part, VortAttention | Memory):
            part.num_key_value_heads //= ranks
    if layer.convolution is not None:
        layer.convolution.channels //= ranks
    run, remember = layer.forward, layer.memory.forward

    def local(name: str, x: Tensor) -> Tensor:
        """A parameter as this rank computes with it."""
        if hasattr(x, "to_local"):
            found: Tensor = x.to_local()
            return found
        x = _SumBackward.apply(x, group)  # type: ignore[no-untyped-call]
        if name == "convolution.weight":
            return torch.cat([part.chunk(ranks)[rank] for part in x.split(sizes)])
        return x / ranks if name == "o_proj.bias" else x

    @contextmanager
    def locally() -> Iterator[None]:
        held = [
            (module, name, x, local(f"{path}.{name}" if path else name, x))
            for path, module in layer.named_modules()
            for name, x in module._parameters.items()
            if x is not None
        ]
        for module, name, _, mine in held:
            module._parameters[name] = mine
        try:
            yield
        finally:
            for module, name, x, _ in held:
                module._parameters[name] = x

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        hidden_states = _SumBackward.apply(hidden_states, group)  # type: ignore[no-untyped-call]
        with locally():
            output, *rest = run(hidden_states, *args, **kwargs)
        rest = [None if x is None else _AllHeads.apply(x, group) for x in rest]  # type: ignore[no-untyped-call]
        return _SumForward.apply(output, group), *rest  # type: ignore[no-untyped-call]

    def retrieve(inputs: MemoryInputs, *args: Any, **kwargs: Any) -> Any:
        if inputs.entropy is not None:
            every: Tensor = _AllHeads.apply(inputs.entropy, group)  # type: ignore[no-untyped-call]
            inputs = replace(inputs, entropy=every)
        return remember(inputs, *args, **kwargs)

    layer.forward, layer.memory.forward = forward, retrieve  # type: ignore[method-assign]
    return layer


class _SumBackward(torch.autograd.Function):
    """x, whose gradient is the sum of what all ranks know of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _SumForward(torch.autograd.Function):
    """The sum of all ranks' x; each rank goes on with it alike, so gradients are whole already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _AllHeads(torch.autograd.Function):
    """`[B, T, H]` of all heads from those of each rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, ranks = group, dist.get_world_size(group)
        found = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ranks)]
        dist.all_gather(found, x.contiguous(), group=group)
        return torch.cat(found, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(dist.get_world_size(ctx.group), -1)[dist.get_rank(ctx.group)], None
