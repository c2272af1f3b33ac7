"""The rows of the tables: models by name, their settings at each size, and how they are built."""

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from vort.lab.experiments.cell import Size
from vort.lab.tasks import Task
from vort.memories import PAPER

__all__ = [
    "BY_KEY",
    "MODELS",
    "RECALL_TRAINING",
    "SLOW",
    "BySize",
    "Model",
    "build_model",
    "few_configurations",
    "model_config",
    "recall_config",
    "sized",
]

Settings = dict[str, Any]

# On a GPU these take several times as long as the others: they come last, lest others wait.
SLOW = ("vort_paper", "gla")

# What VORT adds to retrieval; the ablations give it to the rivals too.
PLAIN: Settings = {"write_gate": False, "read_weights": False}
FAVOR: Settings = {"feature_map": "favor"}
# The paper's layer, but for what a table sets for all its rows alike: sizes, the router's inputs.
AS_PRINTED: Settings = {
    name: PAPER[name]
    for name in ("routing", "feature_map", *PLAIN, "qk_norm", "output_norm", "conv_size")
}
# A rival's layer as the paper writes it: the same without a router.
_PRINTED: Settings = {name: value for name, value in AS_PRINTED.items() if name != "routing"}


class BySize(NamedTuple):
    """A setting that differs with the size of the experiment."""

    laptop: Any
    paper: Any


@dataclass(frozen=True)
class Model:
    """A row: what tables call it, its settings, and whose rows of the paper it stands for.

    Attributes:
        label: for people.
        settings: of `VortConfig`, beside the sizes of the table; a `BySize` where sizes differ.
        paper_row: of the paper's table.
        has: what it has that no row of the paper has, or has not, in words: tables print it.
        kin: the row whose searched learning rate it takes where none was searched for it.
        judged_by: what a search for it goes by: "bits" of all validation queries, or "long", of
            those at the longest lags.
    """

    label: str
    settings: Settings
    paper_row: str = ""
    has: str = ""
    kin: str = ""
    judged_by: Literal["bits", "long"] = "bits"


_POWER_LAW = {"memory": "uniform_power_law", "learn_rates": False}
# The paper's single rate, the same for all heads, tuned on validation data from outside.
_EXPONENTIAL = {"memory": "exponential", "learn_rates": False}
# As many scales as VORT: the same state.
_SCALES = {"num_scales": BySize(laptop=8, paper=12)}
_MIXTURE_AT_RATES = {"memory": "mixture", "rates_start": "basis", **_SCALES}
_GATES = "read weights and a write gate"
_FIRST_WINDOW = {"layer_settings": [{}, *({"sliding_window": 0} for _ in range(3))]}
_FIRST_ALONE = "a window in the first of four layers alone"

# Rows of the paper's tables, and what stands beside them.
_TABLES: dict[str, Model] = {
    "vort": Model(
        "VORT (ours)",
        {},
        # The paper's rows have one order for all tokens: none of them is VORT.
        has=f"an order for each token, {_GATES}",
    ),
    "vort_paper": Model("VORT as printed", AS_PRINTED, has="banks of orders and a router"),
    "power_law": Model("Power-Law .7", {**_POWER_LAW, **PLAIN}, "Power-Law (ours)"),
    "uniform_power_law": Model(
        "Power-Law, learned",
        {**_POWER_LAW, "learn_rates": True, **PLAIN},
        has="a learned order, one for all tokens and heads",
    ),
    "mixture": Model("Mixture-5", {"memory": "mixture", **PLAIN}, "Mixture-5"),
    "exponential": Model("Exponential", {**_EXPONENTIAL, **PLAIN}, "Exponential"),
    "gla": Model(
        "GLA",
        {"memory": "gla"},
        has="a learned gate for each step and feature that decides what the state keeps; no "
        "feature map, no read weights, one matrix of state for each head",
    ),
    "none": Model("no memory", {"memory": "none"}),
    "softmax": Model(
        "full attention",
        {"memory": "softmax"},
        has="every pair of positions, at quadratic cost; no feature map",
    ),
    "mamba2": Model(
        "Mamba-2's recurrence",
        {"memory": "mamba2"},
        has="a learned decay for each step and head that scales what is written, too; no feature "
        "map, no read weights, one matrix of state for each head",
    ),
    "gated_delta": Model(
        "Gated DeltaNet",
        {"memory": "gated_delta"},
        has="a learned decay for each step and head, and tokens that replace what their key finds; "
        "no feature map, no read weights, one matrix of state for each head",
    ),
    "power_law_favor": Model(
        "Power-Law .7, FAVOR+", {**_POWER_LAW, **PLAIN, **FAVOR}, "Power-Law (ours)"
    ),
    "mixture_favor": Model(
        "Mixture-5, FAVOR+", {"memory": "mixture", **PLAIN, **FAVOR}, "Mixture-5"
    ),
    "exponential_favor": Model(
        "Exponential, FAVOR+", {**_EXPONENTIAL, **PLAIN, **FAVOR}, "Exponential"
    ),
}

# Rivals with what VORT has, at VORT's state where they can have it.
_GATED: dict[str, Model] = {
    "mixture_rates_gated": Model(
        "Mixture at VORT's rates, gated",
        _MIXTURE_AT_RATES,
        has=f"as many rates as VORT, learned from where VORT's are, {_GATES}",
        kin="mixture",
    ),
    "mixture_rates_gain": Model(
        "Mixture at VORT's rates, gated, write gain",
        {**_MIXTURE_AT_RATES, "write_gain": "token"},
        has=f"as many rates as VORT, learned from where VORT's are, {_GATES}, and a gain without "
        "bound by which a token scales what it writes",
        kin="mixture",
    ),
    "mixture_rates_free": Model(
        "Mixture at VORT's rates, gated, free writes",
        {**_MIXTURE_AT_RATES, "write_gain": "scale"},
        has=f"the same with a gain of its own for each rate: a token's kernel is any mixture, "
        f"where VORT's is a power law; {_GATES}",
        kin="mixture",
    ),
    "mixture_gated": Model("Mixture-5, gated", {"memory": "mixture"}, has=_GATES, kin="mixture"),
    "mixture_even_gated": Model(
        "Mixture, as many rates as VORT, gated",
        {"memory": "mixture", **_SCALES},
        has=f"as many rates as VORT, learned from even ones, {_GATES}",
        kin="mixture",
    ),
    "uniform_power_law_gated": Model(
        "Power-Law, learned for each head, gated",
        {"memory": "uniform_power_law", "order_per_head": True, **_SCALES},
        has=f"a learned order for each head (VORT but for one order for all tokens), {_GATES}",
        kin="uniform_power_law",
    ),
    "exponential_learned_gated": Model(
        "Exponential, learned for each head, gated",
        # Rates start spread up to the horizon; a head alone in the middle of that.
        {"memory": "exponential", "exponential_rate": BySize(laptop=1 / 64, paper=None)},
        has="a learned rate for each head and a write gate",
        kin="exponential",
    ),
    "exponential_long": Model(
        "Exponential, best at long lags",
        {**_EXPONENTIAL, **PLAIN},
        has="a time constant chosen for long lags, where the paper's is tuned for all",
        kin="exponential",
        judged_by="long",
    ),
    "linear_gated": Model(
        "no decay, write gate",
        {"memory": "linear"},
        has="no decay at all (linear attention), and a write gate",
        kin="exponential",
    ),
    "gla_gated": Model(
        "GLA at VORT's state, gated",
        # The norm of each head takes a normaliser out again, and kernels like 64 columns.
        {"memory": "gla_scales", "normalizer": "none"},
        has=f"as many states as VORT, each with a learned gate for every step and feature; the "
        f"learned feature map, {_GATES}",
        kin="gla",
    ),
}

# VORT without each of its parts, and the paper's ablations.
_PARTS_OFF: dict[str, Model] = {
    "vort_spread": Model(
        "VORT, heads start apart", {"order_start": None}, has="what VORT has", kin="vort"
    ),
    "vort_s8": Model(
        "VORT, S = 8",
        {"num_scales": 8},
        has=f"fewer scales, hence less state than VORT; an order for each token, {_GATES}",
        kin="vort",
    ),
    "vort_even": Model(
        "VORT, all scales read alike at first",
        {},
        has=f"heads that begin to read all scales alike; an order for each token, {_GATES}",
        kin="vort",
    ),
    "vort_first_window": Model(
        "VORT, a window in every fourth layer",
        _FIRST_WINDOW,
        has=f"{_FIRST_ALONE}; an order for each token, {_GATES}",
        kin="vort",
    ),
    "exponential_first_window": Model(
        "Exponential, learned for each head, gated, a window in every fourth layer",
        {"memory": "exponential", **_FIRST_WINDOW},
        has=f"{_FIRST_ALONE}; a learned rate for each head and a write gate",
        kin="exponential_learned_gated",
    ),
    "mixture_rates_first_window": Model(
        "Mixture at VORT's rates, gated, a window in every fourth layer",
        {**_MIXTURE_AT_RATES, **_FIRST_WINDOW},
        has=f"{_FIRST_ALONE}; as many rates as VORT, learned from where VORT's are, {_GATES}",
        kin="mixture_rates_gated",
    ),
    "vort_free": Model(
        "VORT, free writes",
        {"write_gain": "scale"},
        has="an order for each token, and a gain of its own for each scale besides: its kernel is "
        f"any mixture, a power law where it begins; {_GATES}",
        kin="vort",
    ),
    "vort_one_scale": Model(
        "VORT, S = 1",
        {"num_scales": 1},
        has="an order for each token that can only scale what it writes, a write gate",
        kin="vort",
    ),
    "vort_banks": Model(
        "VORT, banks",
        {"routing": "banks"},
        has=f"banks instead of a continuous order, {_GATES}",
        kin="vort",
    ),
    "vort_no_read": Model(
        "VORT, no read weights",
        {"read_weights": False},
        has="an order for each token, a write gate",
        kin="vort",
    ),
    "vort_no_gate": Model(
        "VORT, no write gate",
        {"write_gate": False},
        has="an order for each token, read weights",
        kin="vort",
    ),
    "vort_no_gates": Model("VORT, neither", dict(PLAIN), has="an order for each token", kin="vort"),
    "vort_half_features": Model(
        "VORT, half the features",
        {"num_features": BySize(laptop=16, paper=32)},
        has=f"half the state of VORT; an order for each token, {_GATES}",
        kin="vort",
    ),
    "vort_no_normalizer": Model(
        "VORT, no normaliser",
        {"normalizer": "none"},
        has=f"an order for each token, {_GATES}",
        kin="vort",
    ),
    "vort_favor": Model(
        "VORT, FAVOR+", dict(FAVOR), has=f"an order for each token, {_GATES}", kin="vort"
    ),
    "power_law_s1": Model(
        "Power-Law .7, S = 1", {**_POWER_LAW, **PLAIN, "num_scales": 1}, kin="power_law"
    ),
    "power_law_exact": Model(
        "Power-Law .7, exact",
        {"memory": "exact_power_law", "learn_rates": False, **PLAIN},
        kin="power_law",
    ),
}

# What practitioners build: full attention in one layer of four, or of two where there are two.
_HYBRIDS: dict[str, Model] = {
    "hybrid_half": Model(
        "VORT, full attention in the second layer",
        {"layer_memories": ["vort", "softmax"]},
        has="every pair of positions in every other layer, at quadratic cost",
        kin="vort",
    ),
    "hybrid_vort": Model(
        "VORT, full attention in one layer of four",
        {"layer_memories": ["vort", "vort", "vort", "softmax"]},
        has="every pair of positions in a quarter of its layers, at quadratic cost",
        kin="vort",
    ),
    "hybrid_gla": Model(
        "GLA, full attention in one layer of four",
        {"memory": "gla", "layer_memories": ["gla", "gla", "gla", "softmax"]},
        has="every pair of positions in a quarter of its layers, at quadratic cost",
        kin="gla",
    ),
}

# The router's other inputs, on the task that has entities; entropy comes with a window.
_INPUTS: dict[str, Model] = {
    "vort_with_inputs": Model(
        "VORT with entropy and entity inputs",
        {"sliding_window": 16, "use_entropy": True, "use_entity": True},
        kin="vort",
    ),
    "vort_no_entropy": Model(
        "VORT, entropy off",
        {"sliding_window": 16, "use_entropy": False, "use_entity": True},
        kin="vort",
    ),
    "vort_no_entity": Model(
        "VORT, entity indicator off",
        {"sliding_window": 16, "use_entropy": True, "use_entity": False},
        kin="vort",
    ),
    "vort_no_inputs": Model("VORT, both inputs off", {"sliding_window": 16}, kin="vort"),
    # On text.
    "vort_entity": Model("VORT, told of entities", {"use_entity": True}, kin="vort"),
}

# The paper's own rows with nothing added: its map, no norms.
_AS_PRINTED_ROWS: dict[str, Model] = {
    "power_law_printed": Model(
        "Power-Law .7 as printed", {**_POWER_LAW, **_PRINTED}, "Power-Law (ours)"
    ),
    "mixture_printed": Model(
        "Mixture-5 as printed", {"memory": "mixture", **_PRINTED}, "Mixture-5"
    ),
    "exponential_printed": Model(
        "Exponential as printed", {**_EXPONENTIAL, **_PRINTED}, "Exponential"
    ),
}

MODELS: dict[str, Model] = {
    **_TABLES,
    **_GATED,
    **_PARTS_OFF,
    **_HYBRIDS,
    **_INPUTS,
    **_AS_PRINTED_ROWS,
}

# One layer that does nothing but retrieve: no window, no convolution, no positions. A token of the
# recall tasks shows its key and its label at once, so neighbours have nothing to add.
_BARE: Settings = {
    "num_hidden_layers": 1,
    "sliding_window": 0,
    "use_entropy": False,
    "conv_size": 0,
    "rope_theta": None,
    "tie_word_embeddings": False,
}
# Retrieval by a key that stands two tokens before its value: the convolution's part, and learned
# sooner without a window beside it. Attention knows no positions, so that full attention may go on
# beyond what it has seen; the norm of each head does what a normaliser would.
BY_KEY: Settings = {
    "sliding_window": 0,
    "rope_theta": None,
    "use_entropy": False,
    "conv_size": 4,
    "normalizer": "none",
    # Embeddings of numbers are what they are answered with.
    "tie_word_embeddings": True,
    "order_start": 0.9,
}
_RECALL: dict[Size, Settings] = {
    "laptop": {
        **_BARE,
        "hidden_size": 64,
        "num_attention_heads": 1,
        "head_dim": 32,
        "num_features": 32,
        "intermediate_size": 64,
        "num_scales": 8,
        "horizon": 1000,
    },
    "paper": {
        **_BARE,
        "hidden_size": 128,
        "num_attention_heads": 2,
        "head_dim": 64,
        "num_features": 64,
        "intermediate_size": 256,
        "num_scales": 12,
        "horizon": 10_000,
        # Both heads for all lags; heads that begin apart leave long ones to one of them.
        "order_start": 0.7,
    },
}
RECALL_TRAINING: dict[Size, Settings] = {
    "laptop": {"steps": 160, "batch_size": 8, "evaluation_sequences": 32},
    # 20 epochs of 5,000 sequences.
    "paper": {
        "steps": 3125,
        "batch_size": 32,
        "evaluation_sequences": 100,
        "checkpoint_every": 1000,
        "workers": 3,
    },
}
# The paper's K = 10 banks of S = 15 scales are 136 states; at laptop size 4 of 8 are 25.
_RECALL_BANKS: dict[Size, Settings] = {
    "laptop": {"num_banks": 4, "num_scales": 8},
    "paper": {"num_banks": 10, "num_scales": 15},
}
# The paper's S = 15 for one order; at laptop size as many as VORT, within 0.4 % of every order.
_POWER_LAW_SCALES: dict[Size, int] = {"laptop": 8, "paper": 15}


def sized(size: Size, sizes: Settings, banks: Settings, settings: Mapping[str, Any]) -> Settings:
    """Settings of a row: its sizes, and as many scales as its kernel takes there.

    banks: sizes of rows that route to banks.
    """
    own: Settings = {}
    if settings.get("routing") == "banks":
        own = banks
    elif settings.get("memory") == "uniform_power_law":
        own = {"num_scales": _POWER_LAW_SCALES[size]}
    elif settings.get("memory") == "mixture":
        own = {"num_scales": 5}
    chosen = {
        name: getattr(value, size) if isinstance(value, BySize) else value
        for name, value in settings.items()
    }
    return {**sizes, **own, **chosen}


def recall_config(size: Size, settings: Mapping[str, Any]) -> Settings:
    """Settings of a model of the recall tables, from what its row says."""
    return sized(size, _RECALL[size], _RECALL_BANKS[size], settings)


def model_config(task: Task, settings: Mapping[str, Any]) -> Any:
    """The `VortConfig` of a model for a task; see `build_model`.

    A cell says what it has otherwise than the defaults when tables were begun, which had no gate
    and read all scales alike.
    """
    from vort.models import VortConfig

    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    begun = {"vocab_size": task.vocab_size, "output_gate": False, "read_start": "even"}
    return VortConfig(**{**begun, **special, **settings})


def build_model(task: Task, settings: Mapping[str, Any], seed: int) -> Any:
    """A `VortForCausalLM` for a task, its weights drawn from the seed.

    Tokens made of parts are embedded as sums of parts, and the head has one row for each class:
    rows for tokens that are never an answer would be parameters that nothing trains. Where settings
    ask for tied embeddings, the head stays the embedding.

    Args:
        task: what it is to learn.
        settings: of `VortConfig`; vocabulary and special tokens are the task's unless given, and
            only where they say so there is an output gate, and heads begin to read apart.
        seed: of the weights.
    """
    import torch
    from torch import nn

    from vort.lab.tasks import embed_parts
    from vort.models import VortForCausalLM

    for name in {settings.get("memory", ""), *(settings.get("layer_memories") or ())}:
        if name in _FLA:
            _import_kernels(_FLA[name])
    torch.manual_seed(seed)
    model: Any = VortForCausalLM(model_config(task, settings))
    if task.parts is not None:
        embed_parts(model, task)
    if task.num_classes < task.vocab_size and not settings.get("tie_word_embeddings"):
        head = nn.Linear(model.config.hidden_size, task.num_classes, bias=False)
        nn.init.normal_(head.weight, std=model.config.initializer_range)
        model.set_output_embeddings(head)
    return model


@contextmanager
def few_configurations(most: int = 3) -> Iterator[None]:
    """Triton kernels defined in here try at most that many configurations, spread over all.

    flash-linear-attention's try dozens each when first called and compile them one by one: for
    gated linear attention that is minutes, in every process. Tables ask for a baseline's accuracy,
    to which the choice makes no difference; the benchmark of speed lets them try all.
    """
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.__init__

    def init(self: Any, fn: Any, names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        configs = list(configs)
        step = max(1, -(-len(configs) // most))
        original(self, fn, names, configs[::step], *args, **kwargs)

    Autotuner.__init__ = init
    try:
        yield
    finally:
        Autotuner.__init__ = original


# Where flash-linear-attention has the kernels of a memory.
_FLA = {
    "gla": "fla.ops.gla",
    "mamba2": "fla.ops.simple_gla",
    "gated_delta": "fla.ops.gated_delta_rule",
}


def _import_kernels(module: str) -> None:
    """Import kernels of a memory, where they are installed and a GPU would run them."""
    import torch

    if torch.cuda.is_available() and importlib.util.find_spec("fla") is not None:
        with few_configurations():
            importlib.import_module(module)
