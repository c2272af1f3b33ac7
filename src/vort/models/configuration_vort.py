"""Everything that defines a VORT model, under Hugging Face's usual names."""

# transformers leaves its own hooks untyped.
# mypy: disable-error-code="no-untyped-call"

import math
from copy import copy
from dataclasses import fields
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig, PreTrainedConfig

from vort.layers.packing import NO_ATTENTIONS
from vort.memories import MEMORIES, PAPER, LayerSettings
from vort.memories.settings import check_meant
from vort.models.folder import AUTO_MAP, check_files, teach_peft, write_code
from vort.names import check_choice, refuse_unknown

__all__ = ["VortConfig"]

# What Hugging Face itself passes beside the fields: bookkeeping, never a setting of the model.
_BOOKKEEPING = {
    "model_type",
    "torch_dtype",
    "name_or_path",
    "_name_or_path",
    "_commit_hash",
    "num_labels",
    "output_attentions",
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "experts_implementation",
    "_experts_implementation_internal",
    "auto_map",
    "use_return_dict",
    "tie_last_hidden_states",
    "quantization_config",
}
_ADDED = "added_by_others"
# Beyond this no machine has room: a slip or a hostile file, refused before anything is built.
_MOST_PARAMETERS = 5 * 10**11
_MOST_LAYERS = 10**4
# Defaults that have changed, as they were: a file says all of its settings, but for those that came
# after it, and weights are of the model that it meant.
_WHEN_ABSENT = {"output_gate": False, "read_start": "even"}
# Settings of which layers may each have their own; the others are the model's.
_OF_A_LAYER = ("horizon", "num_features", "num_scales", "sliding_window")


@strict
class VortConfig(PreTrainedConfig, LayerSettings):
    """Settings of a model; unknown keys are an error.

    Those of a layer and its memory are described in `LayerSettings`. Beside them:

    Args:
        vocab_size: number of tokens; 259 is what `ByteTokenizer` has.
        intermediate_size: width of the gated MLP, before match_parameters; 8/3 hidden_size in
            multiples of 32 by default.
        num_hidden_layers: blocks.
        layer_memories: memories of the layers from the first on, begun anew until all have one:
            ["vort", "vort", "vort", "softmax"] is full attention in every fourth layer. None: all
            have `memory`, which is otherwise the first of these.
        layer_settings: what layers have otherwise than the model, from the first on, begun anew
            until all have theirs: [{"num_scales": 4}, {}] is four scales in every second layer.
            A layer may have a horizon, num_features, num_scales and a sliding_window of its own.
        max_position_embeddings: length the model is meant for. Nothing in it ends there.
        match_parameters: correct the width of the MLP so that models of the same sizes have
            equally many parameters, whatever the memory and its options; see `mlp_width`.
        mlp_size: the width that comes of it; filled in when a model is built and saved with it,
            since what it was matched with may change between versions.
        initializer_range: standard deviation of initial weights.
        tie_word_embeddings: one matrix for input and output embeddings.
        use_cache: keep the memory between calls by default.
        pad_token_id: as in `ByteTokenizer`, like the next two.
        bos_token_id: see pad_token_id.
        eos_token_id: see pad_token_id.

    >>> VortConfig(hidden_size=64, num_attention_heads=4).head_dim
    16
    """

    model_type = "vort"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  # Trainer adds lists to it

    vocab_size: int = 259
    intermediate_size: int | None = None
    num_hidden_layers: int = 4
    layer_memories: list[str] | None = None
    layer_settings: list[dict[str, int]] | None = None
    max_position_embeddings: int = 8192
    match_parameters: bool = True
    mlp_size: int | None = None
    initializer_range: float | int = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = 256
    bos_token_id: int | None = 257
    eos_token_id: int | list[int] | None = 258

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in derived values; refuse what is unknown or out of range."""
        # What somebody else has added to a configuration, see `to_dict`.
        added = kwargs.pop(_ADDED, None) or {}
        # What nothing reads is most often a slip that would silently do nothing.
        passed_on = _BOOKKEEPING | set(GenerationConfig().to_dict())
        unknown = [key for key in kwargs if key not in passed_on]
        refuse_unknown("VortConfig", unknown, [x.name for x in fields(self)], ValueError)
        self._name_memories()
        LayerSettings.__post_init__(self)
        self._check_layers()
        check_meant(self, self.layer_memories or [self.memory])
        if kwargs.get("output_attentions"):
            raise ValueError(NO_ATTENTIONS)
        if self.intermediate_size is None:
            self.intermediate_size = -(-self.hidden_size * 8 // 3 // 32) * 32
        self._check_room()
        PreTrainedConfig.__post_init__(self, **kwargs)
        for name, value in added.items():
            setattr(self, name, value)

    def _name_memories(self) -> None:
        """Refuse layers' memories that there are not; `memory` is one of them."""
        names = self.layer_memories
        if names is None:
            return
        if not 0 < len(names) <= self.num_hidden_layers:
            raise ValueError(
                f"layer_memories must name 1 to {self.num_hidden_layers} memories, one for each "
                f"layer or for the first of them, got {len(names)}"
            )
        for name in names:
            check_choice("layer_memories", name, MEMORIES)
        if self.memory not in names:
            if self.memory != LayerSettings.memory:
                shown = ", ".join(map(repr, names))
                raise ValueError(
                    f"memory must be among layer_memories ({shown}), or left out, "
                    f"got {self.memory!r}"
                )
            self.memory = names[0]

    def _check_layers(self) -> None:
        """Refuse settings that a layer cannot have of its own, or that none could have."""
        given = self.layer_settings
        if given is None:
            return
        if not 0 < len(given) <= self.num_hidden_layers:
            raise ValueError(
                f"layer_settings must be of 1 to {self.num_hidden_layers} layers, the first of "
                f"them or all, got {len(given)}"
            )
        shared = {x.name: getattr(self, x.name) for x in fields(LayerSettings)}
        for own in given:
            refuse_unknown("layer_settings", own, _OF_A_LAYER, ValueError)
            LayerSettings(**{**shared, **own})

    def own_settings(self, layer: int) -> dict[str, int]:
        """What a layer has otherwise than the model.

        >>> config = VortConfig(num_hidden_layers=3, layer_settings=[{"num_scales": 4}, {}])
        >>> [config.of_layer(layer).num_scales for layer in range(3)]
        [4, 8, 4]
        """
        given = self.layer_settings
        return {} if given is None else given[layer % len(given)]

    def memory_of(self, layer: int) -> str:
        """The name of a layer's memory.

        >>> config = VortConfig(num_hidden_layers=5, layer_memories=["gla", "gla", "softmax"])
        >>> [config.memory_of(layer) for layer in range(5)]
        ['gla', 'gla', 'softmax', 'gla', 'gla']
        """
        names = self.layer_memories
        return self.memory if names is None else names[layer % len(names)]

    def memory_in_words(self) -> str:
        """What the layers remember with, in a line.

        >>> VortConfig().memory_in_words()
        'vort'
        >>> names = ["vort", "vort", "vort", "softmax"]
        >>> VortConfig(num_hidden_layers=8, layer_memories=names).memory_in_words()
        '3 x vort, 1 x softmax, in turn'
        """
        names = self.layer_memories or [self.memory]
        if len(set(names)) == 1:
            return names[0]
        runs = ", ".join(f"{len(list(run))} x {name}" for name, run in groupby(names))
        return runs + (", in turn" if len(names) < self.num_hidden_layers else "")

    def of_layer(self, layer: int) -> "VortConfig":
        """What a layer is made from: the same settings, but for its own."""
        changes = {"memory": self.memory_of(layer), **self.own_settings(layer)}
        if all(getattr(self, name) == value for name, value in changes.items()):
            return self
        own = copy(self)
        for name, value in changes.items():
            setattr(own, name, value)
        return own

    def _check_room(self) -> None:
        """Refuse sizes that nobody means."""
        layers, size = self.num_hidden_layers, self.hidden_size
        if not 0 < layers <= _MOST_LAYERS:
            raise ValueError(f"num_hidden_layers must lie in 1..{_MOST_LAYERS}, got {layers}")
        for name in ("vocab_size", "intermediate_size", "mlp_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 <= self.initializer_range < math.inf:
            raise ValueError(
                f"initializer_range must be 0 or more and finite, got {self.initializer_range}"
            )
        heads, kv_heads, head_dim = self.head_sizes()
        assert self.intermediate_size is not None
        mixed = (2 * heads + 2 * kv_heads) * head_dim * (size + self.conv_size)
        own = self.layer_settings or [{}]
        scales = max(each.get("num_scales", self.num_scales) for each in own)
        features = max(each.get("num_features", self.num_features) or head_dim for each in own)
        routed = size * heads * (2 + scales + self.num_banks)
        mapped = 2 * heads * head_dim * features
        width = max(self.intermediate_size, self.mlp_size or 0)
        count = layers * (mixed + routed + mapped + 3 * size * width) + size * self.vocab_size
        if count > _MOST_PARAMETERS:
            raise ValueError(
                f"a model of this configuration would have about {count:.0e} parameters "
                f"(num_hidden_layers {layers}, hidden_size {size}, vocab_size {self.vocab_size})"
            )

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The configuration that was saved; what a file of an earlier version lacks is as then."""
        return super().from_dict({**_WHEN_ABSENT, **config_dict}, **kwargs)

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """What is written in config.json."""
        check_files(pretrained_model_name_or_path)
        return super().get_config_dict(pretrained_model_name_or_path, **kwargs)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Write config.json to a folder, and beside it where the Auto classes find this model."""
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        write_code(save_directory)
        self.auto_map = AUTO_MAP
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Nothing to do: saved folders name `vort_auto.py`, no copy of this file."""

    def to_dict(self) -> dict[str, Any]:
        """All settings; attributes that somebody else has added stand apart, by themselves.

        A key that no setting has would be taken for a slip when the configuration is loaded.
        """
        teach_peft()  # which asks for this before it looks for its defaults
        found: dict[str, Any] = super().to_dict()
        added = [key for key in found if key not in _known_keys()]
        if added:
            found[_ADDED] = {key: found.pop(key) for key in added}
        return found

    @classmethod
    def paper(cls, **overrides: Any) -> "VortConfig":
        """The paper to the letter: see `VortAttention.paper`. One layer, K = 10, S = 15.

        >>> config = VortConfig.paper(hidden_size=64)
        >>> config.routing, config.num_banks, config.read_weights
        ('banks', 10, False)
        """
        return cls(**{**PAPER, "num_hidden_layers": 1, **overrides})


@cache
def _known_keys() -> frozenset[str]:
    """What a configuration has of its own accord."""
    own = {*vars(VortConfig()), *(x.name for x in fields(VortConfig))}
    theirs = {"model_type", "transformers_version", "architectures", "dtype"}
    return frozenset({*own, *theirs, *_BOOKKEEPING, *GenerationConfig().to_dict()})
