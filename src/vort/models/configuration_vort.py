"""Everything that defines a VORT model, under Hugging Face's usual names."""

# transformers leaves its own hooks untyped.
# mypy: disable-error-code="no-untyped-call"

from dataclasses import fields
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig, PreTrainedConfig

from vort.memories import PAPER, LayerSettings
from vort.names import refuse_unknown

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


@strict
class VortConfig(PreTrainedConfig, LayerSettings):
    """Settings of a model; unknown keys are an error.

    Those of a layer and its memory are described in `LayerSettings`. Beside them:

    Args:
        vocab_size: number of tokens; 259 is what `ByteTokenizer` has.
        intermediate_size: width of the gated MLP, before match_parameters; 8/3 hidden_size in
            multiples of 32 by default.
        num_hidden_layers: blocks.
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
    max_position_embeddings: int = 8192
    match_parameters: bool = True
    mlp_size: int | None = None
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = 256
    bos_token_id: int | None = 257
    eos_token_id: int | list[int] | None = 258

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in derived values; refuse what is unknown or out of range."""
        # What nothing reads is most often a slip that would silently do nothing.
        passed_on = _BOOKKEEPING | set(GenerationConfig().to_dict())
        unknown = [key for key in kwargs if key not in passed_on]
        refuse_unknown("VortConfig", unknown, [x.name for x in fields(self)], ValueError)
        LayerSettings.__post_init__(self)
        if self.intermediate_size is None:
            self.intermediate_size = -(-self.hidden_size * 8 // 3 // 32) * 32
        PreTrainedConfig.__post_init__(self, **kwargs)

    @classmethod
    def paper(cls, **overrides: Any) -> "VortConfig":
        """The paper to the letter: see `VortAttention.paper`. One layer, K = 10, S = 15.

        >>> config = VortConfig.paper(hidden_size=64)
        >>> config.routing, config.num_banks, config.read_weights
        ('banks', 10, False)
        """
        return cls(**{**PAPER, "num_hidden_layers": 1, **overrides})
