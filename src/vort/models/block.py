"""A block of the model: attention around a memory, then an MLP, each after a norm."""

# transformers leaves its own hooks untyped.
# mypy: disable-error-code="no-untyped-call"

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from vort.layers import RMSNorm, VortAttention
from vort.layers.parts import VortMLP
from vort.layers.step import attention_step
from vort.memories import Memory
from vort.models.configuration_vort import VortConfig
from vort.ops.asked import Asked, norm_of_asked, pick
from vort.ops.gpu.launcher import kernels_take
from vort.ops.linear import few_rows, is_bare, is_plain, is_watched


class VortBlock(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    # A checkpointed block reads its cache and leaves it as it is: `VortModel` sees to that.
    _can_checkpoint_with_cache = True

    def __init__(self, config: VortConfig, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = VortAttention(config.of_layer(layer_idx), layer_idx=layer_idx)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = VortMLP(config.hidden_size, mlp_width(config))

    def forward(
        self, hidden_states: Tensor, delta: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states after the block, and orders if asked for.

        delta: still to be added to the hidden states, as `deferred` leaves it.
        """
        hidden_states, delta, order = self.deferred(hidden_states, delta, **kwargs)
        return hidden_states if delta is None else hidden_states + delta, order

    def deferred(
        self, hidden_states: Tensor, delta: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """`forward`, the last sum left to whoever reads it: hidden states, delta, orders."""
        if kwargs.get("entity_mask") is not None and not memory_in(self).needs_entity:
            kwargs["entity_mask"] = None  # it is for other layers
        stepped = self._step(hidden_states, delta, **kwargs)
        if stepped is not None:
            return stepped, None, None
        attention, mlp = self.self_attn, self.mlp
        norms = (self.input_layernorm, self.post_attention_layernorm)
        if self.has_own_parts and are_bare(*norms) and is_plain(hidden_states, *mlp.children()):
            found = attention.after_norm(norms[0], hidden_states, delta=delta, **kwargs)
            hidden_states, *mixed = found
            hidden_states, delta = mlp.after_norm(norms[1], hidden_states, mixed[0])
        else:
            hidden_states = hidden_states if delta is None else hidden_states + delta
            mixed = attention(norms[0](hidden_states), **kwargs)
            hidden_states = hidden_states + mixed[0]
            hidden_states, delta = hidden_states + mlp(norms[1](hidden_states)), None
        return hidden_states, delta, mixed[2] if len(mixed) > 2 else None

    @property
    def has_own_parts(self) -> bool:
        """Whether attention and MLP are ours, and nobody has wrapped or hooked them.

        Else they are called.
        """
        attention, mlp = self.self_attn, self.mlp
        ours = type(attention) is VortAttention and type(mlp) is VortMLP
        return ours and not is_watched(attention, mlp)

    def takes_asked(self, asked: Asked) -> bool:
        """Whether `of_asked` does what `forward` would: all parts are ours, and nobody watches."""
        if not self.has_own_parts or is_watched(self):
            return False
        attention, mlp = self.self_attn, self.mlp
        norms = [self.post_attention_layernorm, *([attention.norm] if attention.norm else [])]
        projections = [attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        if asked.late:
            norms += [self.input_layernorm]
            projections += [attention.g_proj] if attention.g_proj else []
        return are_bare(*norms) and all(is_bare(each) for each in projections)

    def of_asked(
        self,
        hidden_states: Tensor,
        delta: Tensor | None,
        asked: Asked,
        entity_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """`deferred` for some positions alone: hidden states and delta, `[rows, hidden_size]`."""
        attention, mlp, norm = self.self_attn, self.mlp, self.post_attention_layernorm
        given: dict[str, Any] = {"entity_mask": entity_mask, "asked": asked}
        if asked.late:
            found = attention.after_norm(self.input_layernorm, hidden_states, delta=delta, **given)
            return mlp.after_norm(norm, pick(found[0], asked), found[1])
        hidden_states = hidden_states if delta is None else hidden_states + delta
        _, mixed, _ = attention.after_norm(None, self.input_layernorm(hidden_states), **given)
        hidden_states = pick(hidden_states, asked) + mixed
        normed = norm_of_asked(hidden_states, *norm.fused(), asked)
        return hidden_states + mlp.of_asked(normed, asked), None

    def _step(
        self,
        x: Tensor,
        delta: Tensor | None,
        past_key_values: Any = None,
        use_cache: bool = False,
        output_orders: bool = False,
        **kwargs: Any,
    ) -> Tensor | None:
        """`forward` of a token a row into states in place, in six launches.

        None: not such a call, or not such a block.
        """
        if not use_cache or not getattr(past_key_values, "in_place", False):
            return None
        given = output_orders or any(x is not None for x in kwargs.values())
        if given or x.shape[1] != 1:
            return None
        mlp, norms = self.mlp, (self.input_layernorm, self.post_attention_layernorm)
        if not self.has_own_parts or not are_bare(*norms):
            return None
        if not is_plain(x, *mlp.children()) or not few_rows(x, *mlp.parameters()):
            return None
        if not kernels_take(x, *(n.weight for n in norms)):
            return None
        x = x if delta is None else x + delta
        mixed = attention_step(self.self_attn, norms[0].fused(), x, past_key_values)
        return None if mixed is None else mlp.step(norms[1].fused(), mixed)


def mlp_width(config: VortConfig) -> int:
    """Width of the MLP: intermediate_size, corrected so that models compare at equal size.

    Memories and options differ in parameters by several percent in small models. With
    `match_parameters` a layer has as many as one of the same sizes with all options at their
    defaults and no output gate: what its attention has more, its MLP has less. Widths are multiples
    of 8, which matrix units of a GPU ask for, where that moves the layer's size by less than 1 %.
    Layers that differ (`layer_memories`, `layer_settings`) have one width: the model is as large,
    not each layer.

    >>> mlp_width(VortConfig(output_gate=False)) == VortConfig().intermediate_size
    True
    >>> mlp_width(VortConfig(memory="none")) > mlp_width(VortConfig())
    True
    """
    if config.mlp_size is not None:
        return config.mlp_size
    width = config.intermediate_size
    assert width is not None
    if not config.match_parameters:
        return width
    default = VortConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        attention_bias=config.attention_bias,
        # The measure of all that were ever matched: those of tables must stay as large as they are.
        output_gate=False,
    )
    missing = _parameters_of_attention(default) - _parameters_of_attention(config)
    matched = width + round(missing / (3 * config.hidden_size))
    if matched < 1:
        raise ValueError(
            f"intermediate_size must leave room for {-missing} parameters that attention has more "
            f"than by default, got {width}; or set match_parameters=False"
        )
    rounded = max(8, 8 * round(matched / 8))
    unit = 3 * config.hidden_size
    # Counted again: FAVOR+ draws where it is built, and what a seed gives rests on how often.
    whole = _parameters_of_attention(config) + matched * unit
    return rounded if abs(rounded - matched) * unit < 0.01 * whole else matched


def _parameters_of_attention(config: VortConfig) -> int:
    """Of a layer; where layers differ, of the mean one."""
    differ = config.layer_memories or config.layer_settings
    layers = range(config.num_hidden_layers if differ else 1)

    def kind(layer: int) -> str:
        return f"{config.memory_of(layer)} {sorted(config.own_settings(layer).items())}"

    counts: dict[str, int] = {}
    for layer in layers:
        if kind(layer) not in counts:
            with torch.device("meta"):
                made = VortAttention(config.of_layer(layer))
            counts[kind(layer)] = sum(parameter.numel() for parameter in made.parameters())
    return round(sum(counts[kind(layer)] for layer in layers) / len(layers))


def memory_in(block: nn.Module) -> Memory:
    """The memory of a block, or of what has wrapped the block or a part of it."""
    found = getattr(getattr(block, "self_attn", None), "memory", None)
    if not isinstance(found, Memory):
        found = next((each for each in block.modules() if isinstance(each, Memory)), None)
    if found is None:
        raise TypeError(f"a block must hold a Memory, got {type(block).__name__} without one")
    return found


def are_bare(*norms: nn.Module) -> bool:
    """Whether norms are ours and nobody has wrapped or hooked them: else they are called."""
    return all(type(norm) is RMSNorm for norm in norms) and not is_watched(*norms)
