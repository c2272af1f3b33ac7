"""Everything that defines a VORT model, under Hugging Face's usual names."""

# transformers leaves its own hooks untyped.
# mypy: disable-error-code="no-untyped-call"

import difflib
from dataclasses import fields
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig, PreTrainedConfig

from vort.memories import MEMORIES, STATELESS, MemorySettings
from vort.ops.feature_maps import FEATURE_MAPS
from vort.ops.retention import NORMALIZERS

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
class VortConfig(PreTrainedConfig):
    """Settings of a model; unknown keys are an error.

    Args:
        vocab_size: number of tokens; 259 is what `ByteTokenizer` has.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated MLP, before match_parameters; 8/3 hidden_size in
            multiples of 32 by default.
        num_hidden_layers: blocks.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads; as many by default.
        head_dim: size of a head; hidden_size / num_attention_heads by default.
        max_position_embeddings: length the model is meant for. Nothing in it ends there.
        sliding_window: positions that local attention sees; 0: no local attention.
        rope_theta: base of RoPE in local (and full) attention; None: no RoPE.
        memory: "vort", or a rival: "exponential", "mixture", "uniform_power_law",
            "exact_power_law", "softmax", "gla", "none".
        match_parameters: correct the width of the MLP so that models of the same sizes have
            equally many parameters, whatever the memory and its options; see `mlp_width`.
        mlp_size: the width that comes of it; filled in when a model is built and saved with it,
            since what it was matched with may change between versions.
        routing: "continuous" (one basis for all orders) or "banks" (the paper's).
        horizon: largest lag the kernels are made for; see `VortModel.set_horizon`.
        num_scales: time scales of a memory, each with a state of its own: rates of the basis, of
            each bank, or of memory="mixture". "exponential", "gla", "softmax" have none to choose.
        num_banks: banks, where routing="banks".
        order_min: lowest order.
        order_start: where all heads' orders begin, as a share of [order_min, 1]; None: spread over
            the heads, see `Router`.
        feature_map: "hedgehog", "favor", "elu", "relu", "taylor" or "identity".
        num_features: features of a head, where the map leaves them free; head_dim by default.
        normalizer: "decayed", "undecayed" or "none".
        include_self: whether a token may read what it writes itself.
        use_entropy: the router sees the entropy of local attention (eq. routing).
        use_entity: the router sees the entity indicator (eq. routing).
        write_gate: tokens scale what they write.
        read_weights: queries weigh the time scales.
        conv_size: positions of the short convolution on q, k, v; 0: none.
        qk_norm: RMS norm of each head's queries and keys.
        output_norm: RMS norm of each head before the output projection.
        output_gate: a gate on each head's output.
        learn_rates: whether "exponential" learns rates and "uniform_power_law" its order.
        exponential_rate: where the rates of memory="exponential" start; spread over the time
            scales up to the horizon by default.
        softmax_cache_size: tokens that memory="softmax" keeps, the last ones; None: all.
        softmax_heavy_hitters: tokens that it keeps at inference by H2O's policy; None: all.
        attention_bias: biases in the projections.
        rms_norm_eps: eps of all norms.
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
    keys_to_ignore_at_inference = ("past_key_values",)

    vocab_size: int = 259
    hidden_size: int = 256
    intermediate_size: int | None = None
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 8192
    sliding_window: int = 128
    rope_theta: float | None = 10000.0
    memory: str = "vort"
    match_parameters: bool = True
    mlp_size: int | None = None
    routing: str = "continuous"
    horizon: int = 8192
    num_scales: int = 8
    num_banks: int = 10
    order_min: float = 0.05
    order_start: float | None = None
    feature_map: str = "hedgehog"
    num_features: int | None = None
    normalizer: str = "decayed"
    include_self: bool = True
    use_entropy: bool = True
    use_entity: bool = False
    write_gate: bool = True
    read_weights: bool = True
    conv_size: int = 4
    qk_norm: bool = True
    output_norm: bool = True
    output_gate: bool = False
    learn_rates: bool = True
    exponential_rate: float | None = None
    softmax_cache_size: int | None = None
    softmax_heavy_hitters: int | None = None
    attention_bias: bool = False
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = 256
    bos_token_id: int | None = 257
    eos_token_id: int | list[int] | None = 258

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in derived values; refuse what is unknown or out of range."""
        self._refuse_unknown(kwargs)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.intermediate_size is None:
            self.intermediate_size = -(-self.hidden_size * 8 // 3 // 32) * 32
        for name, allowed in (
            ("memory", MEMORIES + STATELESS),
            ("routing", ("continuous", "banks")),
            ("feature_map", tuple(FEATURE_MAPS)),
            ("normalizer", NORMALIZERS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}"
                )
        super().__post_init__(**kwargs)

    @classmethod
    def paper(cls, **overrides: Any) -> "VortConfig":
        """The paper to the letter: see `VortAttention.paper`. One layer, K = 10, S = 15.

        >>> config = VortConfig.paper(hidden_size=64)
        >>> config.routing, config.num_banks, config.read_weights
        ('banks', 10, False)
        """
        settings: dict[str, Any] = {
            "num_hidden_layers": 1,
            "routing": "banks",
            "num_banks": 10,
            "num_scales": 15,
            "horizon": 10000,
            "feature_map": "favor",
            "num_features": 64,
            "use_entropy": True,
            "use_entity": True,
            "write_gate": False,
            "read_weights": False,
            "conv_size": 0,
            "qk_norm": False,
            "output_norm": False,
            "output_gate": False,
        }
        return cls(**{**settings, **overrides})

    def memory_settings(self) -> MemorySettings:
        """What the memory of a layer is built from."""
        assert self.head_dim is not None
        return MemorySettings(
            hidden_size=self.hidden_size,
            num_heads=self.num_attention_heads,
            head_dim=self.head_dim,
            num_key_value_heads=self.num_key_value_heads,
            routing=self.routing,  # type: ignore[arg-type]
            horizon=self.horizon,
            terms=self.num_scales,
            banks=self.num_banks,
            order_min=self.order_min,
            order_start=self.order_start,
            use_entropy=self.use_entropy,
            use_entity=self.use_entity,
            write_gate=self.write_gate,
            read_weights=self.read_weights,
            features=self.feature_map,
            num_features=self.num_features,
            normalizer=self.normalizer,  # type: ignore[arg-type]
            include_self=self.include_self,
            rope_base=self.rope_theta,
            components=self.num_scales,
            learn_rates=self.learn_rates,
            rate=self.exponential_rate,
            cache_size=self.softmax_cache_size,
            heavy_hitters=self.softmax_heavy_hitters,
        )

    @classmethod
    def _refuse_unknown(cls, kwargs: dict[str, Any]) -> None:
        """Raise on a key that nothing reads: most often a slip that would silently do nothing."""
        known = {field.name for field in fields(cls)}
        generation = set(GenerationConfig().to_dict())
        for key in kwargs:
            if key in _BOOKKEEPING or key in generation:
                continue
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"VortConfig has no setting {key!r}{hint}")
