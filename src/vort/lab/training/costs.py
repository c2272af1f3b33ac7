"""What a training step costs on many GPUs, before there are any: memory, traffic and time.

The constants are in `costs.json`, fitted by `tools/fit_costs.py` to runs that were measured on one
GPU. What a step computes and keeps is counted from the sizes of a model; what it sends is counted
exactly. How fast a network is was not measured: that is an assumption of the caller.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

__all__ = ["GIB", "PLAN_SIZES", "Arrangement", "Costs", "Estimate", "Shape", "arrange", "estimate"]

GIB = 2**30
# Of `estimate`: bytes of a parameter that is trained, in bfloat16 by FSDP2 with AdamW.
MASTER, GRADIENT, MOMENTS, WORKING = 4, 4, 8, 2
_FULL = 0.9  # how much of a GPU's memory a plan may fill
_LOGITS = 2**28  # that the loss has at a time, see `vort.ops.linear`


def _size(layers: int, width: int, heads: int) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    return {**sizes, "vocab_size": 32_000, "output_gate": True, "num_scales": 8}


PLAN_SIZES: dict[str, dict[str, Any]] = {
    "125m": _size(12, 768, 12),
    "350m": _size(24, 1024, 16),
    "760m": _size(24, 1536, 24),
    "1.3b": _size(24, 2048, 32),
    "2.7b": _size(32, 2560, 40),
    "7b": _size(32, 4096, 64),
    "13b": _size(40, 5120, 80),
}


@dataclass(frozen=True)
class Costs:
    """Constants of a GPU.

    Attributes:
        flops: of matrix products, a second.
        retention: seconds for each token, layer, head, scale, feature and value.
        local: seconds for each token, layer, position of a window, head and channel.
        attention: seconds for each token, layer, position of the past, head and channel.
        stream: seconds for each token, layer and hidden channel, of all that is bound by memory.
        loss: seconds for each token and entry of the vocabulary.
        host: seconds a layer that the host takes to launch a step.
        slack: time of a long step over that of its kernels.
        kept: hidden-sized tensors in bfloat16 that a layer keeps for its backward.
        fixed: bytes besides weights, gradients and what layers keep.
        memory: bytes that the GPU has.
        made_by: where they come from.
    """

    flops: float
    retention: float
    local: float
    attention: float
    stream: float
    loss: float
    host: float
    slack: float
    kept: float
    fixed: float
    memory: float
    made_by: Mapping[str, Any]

    @classmethod
    def load(cls) -> "Costs":
        """Those that come with the package."""
        return cls(**json.loads(Path(__file__).with_name("costs.json").read_text()))


class LayerShape(NamedTuple):
    """What a layer has of its own.

    Attributes:
        scales: of its memory; 0: it keeps no state.
        features: of its keys; 0 likewise.
        window: positions that local attention sees; 0: none.
        reach: positions that full attention sees, infinite where the past is all of it; 0: it has
            none.
    """

    scales: int
    features: int
    window: int
    reach: float

    @classmethod
    def of(cls, layer: Any) -> "LayerShape":
        """That of a `VortAttention`; memories whose costs nobody has measured are an error."""
        from vort.memories import ExactPowerLawMemory, NoMemory, RetentionMemory, SoftmaxMemory

        memory = layer.memory
        if isinstance(memory, SoftmaxMemory):
            return cls(0, 0, layer.window, memory.cache_size or float("inf"))
        if isinstance(memory, NoMemory):
            return cls(0, 0, layer.window, 0)
        if isinstance(memory, RetentionMemory) and not isinstance(memory, ExactPowerLawMemory):
            return cls(memory.num_scales, memory.key_map.output_dim, layer.window, 0)
        raise ValueError(
            "a plan knows what memories of constant decays cost (vort, exponential, mixture, "
            f"uniform_power_law, linear), softmax and none, got {memory.settings.memory}"
        )


@dataclass(frozen=True)
class Shape:
    """A model in the numbers that its costs follow from.

    Attributes:
        parameters: all of them.
        outside: those outside of blocks: embeddings, of which a tied one is counted once.
        products: entries of all matrices that a token is multiplied by.
        each: what the layers have of their own, one after the other.
        halo: positions of the rank before that every layer is given.
        cuts: whether sequences can be cut over ranks.
    """

    parameters: int
    outside: int
    products: int
    each: tuple[LayerShape, ...]
    width: int
    heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    halo: int
    cuts: bool

    @classmethod
    def of(cls, **settings: Any) -> "Shape":
        """That of a `VortConfig`."""
        from vort.distributed.context import halo_size
        from vort.models import VortConfig, VortForCausalLM

        with torch.device("meta"):
            model = VortForCausalLM(VortConfig(**settings))
        config, layers = model.config, list(model.model.layers)
        count = sum(x.numel() for x in model.parameters())
        blocks = sum(x.numel() for x in model.model.layers.parameters())
        head = config.vocab_size * config.hidden_size
        assert config.head_dim is not None
        return cls(
            parameters=count,
            outside=count - blocks,
            products=blocks + head,
            each=tuple(LayerShape.of(block.self_attn) for block in layers),
            width=config.hidden_size,
            heads=config.num_attention_heads,
            head_dim=config.head_dim,
            mlp=int(config.mlp_size or 0),
            vocabulary=config.vocab_size,
            halo=halo_size(model.model),
            cuts=all(memory.takes_parts for memory in model.model.memories),
        )

    @property
    def layers(self) -> int:
        """How many there are."""
        return len(self.each)

    @property
    def states(self) -> list[int]:
        """Bytes of each layer's memory of a sequence, its normaliser included."""
        size = 4 * self.heads * (self.head_dim + 1)
        return [size * layer.scales * layer.features for layer in self.each]

    def kept(self, costs: Costs, *, cut: bool = False) -> list[float]:
        """Bytes that each layer keeps of a token for its backward.

        cut: whether sequences are cut over ranks. Of a part also what stands with its halo is kept,
            and what of its writing is left at its end.
        """
        alike = 2 * costs.kept * self.width + 2 * 2 * self.mlp + cut * 2 * self.width
        routed = [4 * self.heads * (2 * x.scales + 2) if x.scales else 0 for x in self.each]
        written = [cut * 4 * self.heads * x.scales for x in self.each]
        return [alike + r + w for r, w in zip(routed, written, strict=True)]

    def loss(self, tokens: float) -> float:
        """Bytes of the logits that are there at a time, and of the gradients made with them."""
        rows = max(256, _LOGITS // self.vocabulary // 256 * 256)
        sums = (4 + 4 * (tokens > rows)) * self.vocabulary * self.width
        return 2 * min(tokens, rows) * self.vocabulary + sums

    def units(self, tokens: float, length: float) -> dict[str, float]:
        """How often each constant of time is paid in a step of so many tokens.

        length: of a sequence, half of which a token of full attention has before it.
        """
        channels = tokens * self.heads * self.head_dim
        return {
            "matrix products": 6 * self.products * tokens,
            "retention": channels * sum(x.scales * x.features for x in self.each),
            "local attention": channels * sum(min(x.window, length) for x in self.each),
            "full attention": channels * sum(min(x.reach, length / 2) for x in self.each),
            "stream": tokens * self.layers * self.width,
            "loss": tokens * self.vocabulary,
        }

    def seconds(self, tokens: float, length: float, costs: Costs) -> dict[str, float]:
        """Time of the parts of a step, kernels alone; arguments as of `units`."""
        units = self.units(tokens, length)
        price = {
            "matrix products": 1 / costs.flops,
            "retention": costs.retention,
            "local attention": costs.local,
            "full attention": costs.attention,
            "stream": costs.stream,
            "loss": costs.loss,
        }
        return {name: units[name] * price[name] for name in units}


def on_one(shape: Shape, tokens: float, length: float, costs: Costs) -> tuple[float, float]:
    """Bytes and seconds of forward and backward on one GPU, weights and gradients in bfloat16."""
    kept, weights = shape.kept(costs), WORKING * shape.parameters
    # Gradients come as what was kept goes: the most is at the beginning of the backward or its end.
    most = max(tokens * sum(kept) + shape.loss(tokens), weights + tokens * kept[0])
    memory = weights + most + costs.fixed
    kernels = sum(shape.seconds(tokens, length, costs).values())
    return memory, max(kernels * costs.slack, costs.host * shape.layers)


@dataclass(frozen=True)
class Arrangement:
    """How GPUs share a step.

    Attributes:
        gpus: all of them; weights, gradients and moments are dealt out to all (FSDP2).
        context: over how many each sequence is cut.
        sequences: of a step on each group of `context`.
        length: tokens of a sequence.
        checkpointing: whether blocks keep their inputs alone and are computed again.
        bandwidth: bytes a second that a GPU sends and receives; assumed, not measured.
    """

    gpus: int
    context: int
    sequences: int
    length: int
    checkpointing: bool
    bandwidth: float

    @property
    def data(self) -> int:
        """Groups that read different sequences."""
        return self.gpus // self.context

    @property
    def tokens(self) -> float:
        """Of a step on one GPU."""
        return self.sequences * self.length / self.context


@dataclass(frozen=True)
class Estimate:
    """What a step takes on one GPU: bytes by part, bytes received by collective, seconds."""

    memory: dict[str, float]
    traffic: dict[str, float]
    seconds: dict[str, float]

    @property
    def total_memory(self) -> float:
        """Bytes of all parts."""
        return sum(self.memory.values())

    @property
    def step(self) -> float:
        """Seconds of a step: weights travel while blocks compute, states and halos do not."""
        s = self.seconds
        return max(s["computing"], s["weights and gradients, hidden"]) + s["states and halos"]


def estimate(shape: Shape, way: Arrangement, costs: Costs) -> Estimate:
    """Memory, traffic and time of a step on each GPU of an arrangement."""
    n, ranks, tokens = way.gpus, way.context, way.tokens
    block = (shape.parameters - shape.outside) / shape.layers
    cut, states = ranks > 1, [way.sequences * state for state in shape.states]
    kept = [tokens * each for each in shape.kept(costs, cut=cut)]
    inputs = tokens * shape.layers * 2 * shape.width
    memory = {
        "weights (float32)": MASTER * shape.parameters / n,
        "gradients": GRADIENT * shape.parameters / n,
        "moments of AdamW": MOMENTS * shape.parameters / n,
        "blocks put together": (2 * WORKING + GRADIENT) * block + WORKING * shape.outside,
        "kept for the backward": inputs + max(kept) if way.checkpointing else sum(kept),
        "states of other ranks": (ranks + 2) * max(states) * cut,
        "logits and loss": shape.loss(tokens),
        "fixed": costs.fixed,
    }
    passes = 3 if way.checkpointing else 2
    share = (n - 1) / n
    halo = 2 * way.sequences * shape.halo * shape.width
    traffic = {
        "all-gather of weights": 2 * WORKING * shape.parameters * share,
        "reduce-scatter of gradients": GRADIENT * shape.parameters * share,
        "all-gather of states": passes * (ranks - 1) * sum(states),
        "halos": passes * shape.layers * halo * cut,
        "all-reduce of the loss": 4.0 * 2 * cut,
    }
    parts = shape.seconds(tokens, way.length, costs)
    if cut:
        # The state alone, before anything is retrieved: a third of a pass more.
        parts["retention"] *= 4 / 3
    kernels = sum(parts.values()) * (4 / 3 if way.checkpointing else 1)
    weights = traffic["all-gather of weights"] + traffic["reduce-scatter of gradients"]
    exchanged = traffic["all-gather of states"] + traffic["halos"]
    seconds = {
        "computing": max(kernels * costs.slack, costs.host * shape.layers),
        "weights and gradients, hidden": weights / way.bandwidth,
        "states and halos": exchanged / way.bandwidth,
    }
    return Estimate(memory, traffic, seconds)


def arrange(
    shape: Shape,
    gpus: int,
    length: int,
    costs: Costs,
    *,
    memory: float,
    bandwidth: float,
    sequences: int = 1,
    context: int | None = None,
) -> Arrangement | None:
    """The arrangement that fits with the fewest ranks to a sequence; None if none does.

    Blocks are computed again only where nothing fits otherwise. A model that has full attention is
    not cut over ranks.
    """
    choices = [context] if context else [p for p in range(1, gpus + 1) if gpus % p == 0]
    choices = choices if shape.cuts else [p for p in choices if p == 1]
    for checkpointing in (False, True):
        for ranks in choices:
            way = Arrangement(gpus, ranks, sequences, length, checkpointing, bandwidth)
            long_enough = length // ranks >= max(shape.halo, 1)
            fits = estimate(shape, way, costs).total_memory <= _FULL * memory
            if fits and (ranks == 1 or long_enough):
                return way
    return None
