"""Memories by name, from one set of settings."""

from dataclasses import dataclass
from typing import Any

from vort.memories.exact_power_law import ExactPowerLawMemory
from vort.memories.exponential import ExponentialMemory
from vort.memories.gla import GatedLinearMemory
from vort.memories.heavy_hitters import HeavyHitterMemory
from vort.memories.interface import Memory
from vort.memories.mixture import MixtureMemory
from vort.memories.none import NoMemory
from vort.memories.router import RoutingMode
from vort.memories.softmax import SoftmaxMemory
from vort.memories.uniform_power_law import UniformPowerLawMemory
from vort.memories.vort_memory import VortMemory
from vort.ops.retention import Normalizer

__all__ = ["MEMORIES", "STATELESS", "MemorySettings", "build_memory"]

MEMORIES = (
    "vort",
    "exponential",
    "mixture",
    "uniform_power_law",
    "softmax",
    "gla",
    "none",
)
# For ablations: no state stands for it, so it scores whole sequences and does not decode.
STATELESS = ("exact_power_law",)


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """What the memories of one layer are made from; each takes what concerns it.

    `write_gate`, `read_weights` and the feature map go to every memory that can have them, so that
    a comparison of kernels compares kernels. The rest is described where it is used: `Router`,
    `RetentionMemory`, and the classes of this folder.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    num_key_value_heads: int | None = None
    routing: RoutingMode = "continuous"
    horizon: int = 8192
    terms: int = 8
    banks: int = 10
    order_min: float = 0.05
    order_start: float | None = None
    use_entropy: bool = False
    use_entity: bool = False
    write_gate: bool = True
    read_weights: bool = True
    features: str = "hedgehog"
    num_features: int | None = None
    normalizer: Normalizer = "decayed"
    include_self: bool = True
    rope_base: float | None = 10000.0
    components: int = 5
    learn_rates: bool = True
    rate: float | None = None
    cache_size: int | None = None
    heavy_hitters: int | None = None


def build_memory(name: str, settings: MemorySettings) -> Memory:
    """The memory called `name`, one of `MEMORIES` or `STATELESS`.

    >>> settings = MemorySettings(hidden_size=16, num_heads=2, head_dim=8)
    >>> [build_memory(name, settings).state_size(100) for name in ("none", "gla", "softmax")]
    [0, 128, 3200]
    """
    s = settings
    sizes = (s.hidden_size, s.num_heads, s.head_dim)
    options: dict[str, Any]
    if name == "vort":
        return _vort(s)
    if name == "exponential":
        return ExponentialMemory(
            *sizes,
            horizon=s.horizon,
            learn_rates=s.learn_rates,
            rate=s.rate,
            write_gate=s.write_gate,
            **_retention(s),
        )
    gates: dict[str, Any] = {"write_gate": s.write_gate, "read_weights": s.read_weights}
    if name == "mixture":
        options = {"horizon": s.horizon, "components": s.components, **gates, **_retention(s)}
        return MixtureMemory(*sizes, **options)
    if name in ("uniform_power_law", "exact_power_law"):
        options = {
            "horizon": s.horizon,
            "terms": s.terms,
            "order_min": s.order_min,
            "learn_order": s.learn_rates,
            **gates,
            **_retention(s),
        }
        kind = UniformPowerLawMemory if name == "uniform_power_law" else ExactPowerLawMemory
        return kind(*sizes, **options)
    if name == "softmax":
        heads = (s.num_heads, s.head_dim, s.num_key_value_heads)
        if s.heavy_hitters is not None:
            return HeavyHitterMemory(*heads, budget=s.heavy_hitters, rope_base=s.rope_base)
        return SoftmaxMemory(*heads, cache_size=s.cache_size, rope_base=s.rope_base)
    if name == "gla":
        return GatedLinearMemory(*sizes)
    if name == "none":
        return NoMemory()
    raise ValueError(f"memory must be one of {', '.join(MEMORIES + STATELESS)}, got {name!r}")


def _retention(s: MemorySettings) -> dict[str, Any]:
    return {
        "features": s.features,
        "num_features": s.num_features,
        "normalizer": s.normalizer,
        "include_self": s.include_self,
    }


def _vort(s: MemorySettings) -> VortMemory:
    return VortMemory(
        s.hidden_size,
        s.num_heads,
        s.head_dim,
        routing=s.routing,
        horizon=s.horizon,
        terms=s.terms,
        banks=s.banks,
        order_min=s.order_min,
        order_start=s.order_start,
        use_entropy=s.use_entropy,
        use_entity=s.use_entity,
        write_gate=s.write_gate,
        read_weights=s.read_weights,
        **_retention(s),
    )
