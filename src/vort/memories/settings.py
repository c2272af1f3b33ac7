"""Every setting of a layer and its memory: spelled once, with one default, for layer and model."""

import math
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

from vort.names import check_choice, refuse_unknown, typed
from vort.ops.feature_maps import FEATURE_MAPS
from vort.ops.retention import NORMALIZERS

__all__ = ["PAPER", "LayerSettings", "check_meant", "settings_of"]

# The layer as the paper writes it: K banks of fixed orders with S Gauss-Legendre terms each
# (corrected, see docs/errata.md), routed by hidden state, entropy and entity indicator; FAVOR+
# features; a decayed normaliser; no read weights, gates, convolution or norm.
PAPER: dict[str, Any] = {
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


# Settings that mean nothing to other memories; what the exact kernel cannot have it refuses itself.
_OF_ONE_MEMORY = {
    "order_per_head": ("uniform_power_law", "exact_power_law"),
    "exponential_rate": ("exponential",),
    "softmax_cache_size": ("softmax",),
    "softmax_heavy_hitters": ("softmax",),
}


@dataclass(kw_only=True)
class LayerSettings:
    """What a layer and its memory are made from; each part takes what concerns it.

    `write_gate`, `read_weights` and the feature map go to every memory that can have them, so that
    a comparison of kernels compares kernels. `VortConfig` has all of these, and what a stack of
    layers needs besides.

    Args:
        hidden_size: size of hidden states in and out: the width of the residual stream.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads, a divisor of the former; as many by default.
        head_dim: size of a head; hidden_size / num_attention_heads by default.
        sliding_window: positions that local attention sees, the current one included; 0: no local
            attention.
        rope_theta: base of RoPE in local (and full) attention; None: no RoPE.
        memory: "vort", or a rival: "exponential", "mixture", "uniform_power_law",
            "exact_power_law", "linear", "softmax", "gla", "gla_scales", "mamba2", "gated_delta",
            "none" (see `vort.memories.MEMORIES`). For one by layer see `VortConfig`.
        routing: "continuous" writes to one basis of rates that all orders share; "banks" writes to
            the nearest of `num_banks` fixed orders (eq. bank-update), straight-through in training.
        horizon: largest lag the kernels are made for; see `VortAttention.set_horizon`. Rates of
            "exponential" and "mixture" start spread up to it.
        num_scales: time scales of a memory, each with a state of its own: rates of the basis, of
            each bank, of memory="mixture" or "gla_scales". "exponential", "linear", "gla",
            "mamba2", "gated_delta" and "softmax" have none to choose.
            `PowerLawBasis.fit(horizon, tolerance=...).terms` says how many an error takes.
        num_banks: banks (K of eq. bank-update), where routing="banks".
        order_min: lowest order.
        order_start: where the orders of all heads begin, as a share of [order_min, 1], or a list
            of such shares, one for each head. None: spread over the heads. Heads that begin apart
            take over short and long lags: text gains by it, but what must be found again at long
            lags is left to few heads (docs/model.md).
        order_input: what memory="vort" reads a token's order from: "hidden", the hidden state, or
            "values", the values of all heads after the short convolution, which have seen the
            tokens just before. Kernels that route in one pass know the former alone.
        order_per_head: memory="uniform_power_law" has an order for each head, which starts where
            VORT's heads do, instead of one for all.
        feature_map: "hedgehog", "favor", "elu", "relu", "taylor" or "identity". The default is a
            learned one; the paper's, "favor", has no parameters and tells fewer keys apart
            (docs/results.md).
        num_features: features of a head, where the map leaves them free; head_dim by default.
        normalizer: "decayed", "undecayed" or "none", see `retention`.
        include_self: whether a token may read what it writes itself.
        use_entropy: the router sees the entropy of every head's local attention (eq. routing).
        use_entity: the router sees the entity indicator (eq. routing).
        write_gate: tokens scale all that they write by a learned gate in (0, 1).
        write_gain: memory="vort" and "mixture" have tokens scale what they write by a learned
            positive gain besides: "token", a gain for each head; "scale", one for each head and
            scale, so that a token's kernel may be any mixture of the scales; "none".
        read_weights: queries weigh the time scales.
        read_start: where those weights begin: "spread", each head around a time scale of its own,
            from quick to slow, or "even", all scales alike. None: "spread" where scales stand from
            slow to quick (not in banks, nor in a mixture of even rates). It pays on text
            (docs/experiments.md).
        conv_size: positions of the short convolution on q, k, v; 0: none.
        qk_norm: RMS norm of each head's queries and keys. Similarities then differ from the first
            step on, where products of small vectors are all alike, and cannot run away later.
        output_norm: RMS norm of each head before the output projection.
        output_gate: multiply heads by silu of a further projection of the hidden states. It pays
            on text (docs/experiments.md); the paper has none.
        learn_rates: whether "exponential" learns its rates and "uniform_power_law" its order.
        learn_basis: memory="vort" with continuous routing learns its rates too: each head has a
            factor for each rate of the basis, which starts at 1. What orders write stays as it is.
        leak: the slowest scale of memory="vort" and "uniform_power_law" forgets too, over the
            horizon. Without it, as in the paper, what lies beyond the horizon weighs as much as
            what lies at it, however far it is.
        exponential_rate: where the rates of memory="exponential" start; spread over the time
            scales up to the horizon by default.
        rates_start: where the rates of memory="mixture" start: "even", in the logarithm from 1 to
            the horizon, or "basis", at the rates that VORT has.
        softmax_cache_size: tokens that memory="softmax" keeps, the last ones; None: all.
        softmax_heavy_hitters: tokens that it keeps at inference by H2O's policy; None: all.
        attention_bias: biases in the projections.
        rms_norm_eps: eps of all norms.

    >>> LayerSettings(hidden_size=64, num_attention_heads=4).head_dim
    16
    """

    hidden_size: int = 256
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    sliding_window: int = 128
    rope_theta: float | int | None = 10000.0
    memory: str = "vort"
    routing: str = "continuous"
    horizon: int = 8192
    num_scales: int = 8
    num_banks: int = 10
    order_min: float | int = 0.05
    order_start: float | int | list[float] | None = None
    order_input: str = "hidden"
    order_per_head: bool = False
    feature_map: str = "hedgehog"
    num_features: int | None = None
    normalizer: str = "decayed"
    include_self: bool = True
    use_entropy: bool = True
    use_entity: bool = False
    write_gate: bool = True
    write_gain: str = "none"
    read_weights: bool = True
    read_start: str | None = None
    conv_size: int = 4
    qk_norm: bool = True
    output_norm: bool = True
    output_gate: bool = True
    learn_rates: bool = True
    learn_basis: bool = False
    leak: bool = False
    exponential_rate: float | int | None = None
    rates_start: str = "even"
    softmax_cache_size: int | None = None
    softmax_heavy_hitters: int | None = None
    attention_bias: bool = False
    rms_norm_eps: float | int = 1e-6

    def __post_init__(self) -> None:
        """Fill in derived values; refuse what is out of range."""
        # Not above: the memories are made from what this file defines.
        from vort.memories import MEMORIES

        for name in ("rope_theta", "order_min", "order_start", "exponential_rate", "rms_norm_eps"):
            value = getattr(self, name)
            if isinstance(value, int):  # 10000 is as good a number as 10000.0
                setattr(self, name, float(value))
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // max(self.num_attention_heads, 1)
        check_choice("memory", self.memory, MEMORIES)
        check_choice("routing", self.routing, ("continuous", "banks"))
        check_choice("feature_map", self.feature_map, FEATURE_MAPS)
        check_choice("normalizer", self.normalizer, NORMALIZERS)
        check_choice("write_gain", self.write_gain, ("none", "token", "scale"))
        check_choice("rates_start", self.rates_start, ("even", "basis"))
        if self.read_start is not None:
            check_choice("read_start", self.read_start, ("even", "spread"))
        check_choice("order_input", self.order_input, ("hidden", "values"))
        self._check_sizes()
        self._check_starts()
        if self.learn_basis and self.routing != "continuous":
            raise ValueError(
                f'learn_basis needs routing="continuous", whose rates orders share, '
                f"got {self.routing!r}"
            )
        if self.leak and self.routing != "continuous":
            raise ValueError(
                f'leak needs routing="continuous", whose slowest scale keeps for good, '
                f"got {self.routing!r}"
            )

    @property
    def reads_spread(self) -> bool:
        """Whether heads begin to read around time scales of their own."""
        return self.read_start == "spread" or (self.read_start is None and self._in_order)

    @property
    def _in_order(self) -> bool:
        """Whether there are read weights over scales that stand from slow to quick."""
        mixed = self.memory == "mixture" and self.rates_start == "even"
        unordered = self.routing != "continuous" or self.memory == "gla_scales" or mixed
        return self.read_weights and not unordered

    def _check_starts(self) -> None:
        if self.read_start == "spread" and not self._in_order:
            raise ValueError(
                'read_start="spread" needs read_weights over scales from slow to quick, got '
                f"read_weights={self.read_weights}, routing={self.routing!r}, "
                f"memory={self.memory!r}, rates_start={self.rates_start!r}"
            )
        given, heads = self.order_start, self.num_attention_heads
        starts = given if isinstance(given, list) else [] if given is None else [given]
        if not all(0 < start < 1 for start in starts):
            raise ValueError(f"order_start must lie in (0, 1), or be None, got {given}")
        if isinstance(given, list) and len(given) != heads:
            raise ValueError(f"order_start must be a share for each of {heads} heads, got {given}")

    def _check_sizes(self) -> None:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads < 1 or self.head_dim is None or self.head_dim < 1:
            raise ValueError(
                f"num_attention_heads and head_dim must be at least 1, got {heads} and "
                f"{self.head_dim} (hidden_size {self.hidden_size})"
            )
        if kv_heads is None or kv_heads < 1 or heads % kv_heads:
            raise ValueError(
                f"num_key_value_heads must divide num_attention_heads = {heads}, got {kv_heads}"
            )
        if self.conv_size < 0 or self.conv_size == 1:
            raise ValueError(
                f"conv_size must be at least 2, or 0 for no convolution, got {self.conv_size}"
            )
        if self.sliding_window < 0:
            raise ValueError(
                "sliding_window must be at least 1, or 0 for no local attention, "
                f"got {self.sliding_window}"
            )
        for name, least in (
            ("hidden_size", 1),
            ("horizon", 1),
            ("num_features", 1),
            ("num_scales", 1),
            ("num_banks", 1),
            ("softmax_cache_size", 1),
            ("softmax_heavy_hitters", 2),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        for name in ("rms_norm_eps", "rope_theta", "exponential_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")

    def head_sizes(self) -> tuple[int, int, int]:
        """Query heads, key and value heads, and the size of a head."""
        assert self.num_key_value_heads is not None
        assert self.head_dim is not None
        return self.num_attention_heads, self.num_key_value_heads, self.head_dim


def check_meant(settings: LayerSettings, memories: Collection[str]) -> None:
    """Refuse settings of one memory where none of `memories` is that one, or somebody's own.

    >>> check_meant(LayerSettings(order_per_head=True), ["vort"])
    Traceback (most recent call last):
    ValueError: order_per_head is for memory='uniform_power_law', got memory='vort'
    """
    from vort.memories import MEMORIES

    if any(not MEMORIES[memory].__module__.startswith("vort.") for memory in memories):
        return  # what it makes of a setting nobody here knows
    for name, its in _OF_ONE_MEMORY.items():
        if getattr(settings, name) not in (None, False) and not {*its} & {*memories}:
            shown = " and ".join(map(repr, sorted({*memories})))
            raise ValueError(f"{name} is for memory={its[0]!r}, got memory={shown}")


def settings_of(owner: str, given: LayerSettings | None, options: dict[str, Any]) -> LayerSettings:
    """What `owner` is made from: settings as they are, or new ones from keywords; not both."""
    if given is None:
        refuse_unknown(owner, options, [field.name for field in fields(LayerSettings)])
        return LayerSettings(**typed(LayerSettings, options))
    if options:
        raise ValueError(f"settings are given, so these have no use: {', '.join(sorted(options))}")
    return given
