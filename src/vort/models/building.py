"""The parts of a model from its configuration, and how models come out equally large."""

import torch

from vort.layers import VortAttention
from vort.memories import build_memory
from vort.models.configuration_vort import VortConfig

__all__ = ["attention_of", "mlp_width"]


def attention_of(config: VortConfig, layer_idx: int = 0) -> VortAttention:
    """The attention layer that a configuration describes."""
    return VortAttention(
        config.hidden_size,
        config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        window=config.sliding_window,
        rope_base=config.rope_theta,
        conv_size=config.conv_size,
        qk_norm=config.qk_norm,
        output_norm=config.output_norm,
        output_gate=config.output_gate,
        bias=config.attention_bias,
        norm_eps=config.rms_norm_eps,
        layer_idx=layer_idx,
        memory=build_memory(config.memory, config.memory_settings()),
    )


def mlp_width(config: VortConfig) -> int:
    """Width of the MLP: intermediate_size, corrected so that models compare at equal size.

    Memories and options differ in parameters by several percent in small models. With
    `match_parameters` a layer has as many as one of the same sizes with all options at their
    defaults: what its attention has more, its MLP has less. Widths are multiples of 8, which
    matrix units of a GPU ask for, where that moves the layer's size by less than 1 %.

    >>> mlp_width(VortConfig()) == VortConfig().intermediate_size
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
    whole = _parameters_of_attention(config) + matched * unit
    return rounded if abs(rounded - matched) * unit < 0.01 * whole else matched


def _parameters_of_attention(config: VortConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in attention_of(config).parameters())
