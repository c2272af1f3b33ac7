"""The rows of the tables: models by name, their settings at each size, and how they are built."""

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vort.lab.experiments.cell import Size
from vort.lab.tasks import Task
from vort.memories import PAPER

__all__ = [
    "MODELS",
    "RECALL_TRAINING",
    "SLOW",
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


@dataclass(frozen=True)
class Model:
    """A row: what tables call it, its settings, and whose rows of the paper it stands for."""

    label: str
    settings: Settings
    paper_row: str = ""


_POWER_LAW = {"memory": "uniform_power_law", "learn_rates": False}
# The paper's single rate, the same for all heads, tuned on validation data from outside.
_EXPONENTIAL = {"memory": "exponential", "learn_rates": False}

MODELS: dict[str, Model] = {
    "vort": Model("VORT (ours)", {}, "Power-Law (ours)"),
    "vort_paper": Model("VORT as printed", AS_PRINTED),
    "power_law": Model("Power-Law .7", {**_POWER_LAW, **PLAIN}, "Power-Law (ours)"),
    "uniform_power_law": Model("Power-Law, learned", {**_POWER_LAW, "learn_rates": True, **PLAIN}),
    "mixture": Model("Mixture-5", {"memory": "mixture", **PLAIN}, "Mixture-5"),
    "exponential": Model("Exponential", {**_EXPONENTIAL, **PLAIN}, "Exponential"),
    "gla": Model("GLA", {"memory": "gla"}),
    "none": Model("no memory", {"memory": "none"}),
    "softmax": Model("full attention", {"memory": "softmax"}),
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
    return {**sizes, **own, **settings}


def recall_config(size: Size, settings: Mapping[str, Any]) -> Settings:
    """Settings of a model of the recall tables, from what its row says."""
    return sized(size, _RECALL[size], _RECALL_BANKS[size], settings)


def model_config(task: Task, settings: Mapping[str, Any]) -> Any:
    """The `VortConfig` of a model for a task; see `build_model`."""
    from vort.models import VortConfig

    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    return VortConfig(**{"vocab_size": task.vocab_size, **special, **settings})


def build_model(task: Task, settings: Mapping[str, Any], seed: int) -> Any:
    """A `VortForCausalLM` for a task, its weights drawn from the seed.

    Tokens made of parts are embedded as sums of parts, and the head has one row for each class:
    rows for tokens that are never an answer would be parameters that nothing trains.

    Args:
        task: what it is to learn.
        settings: of `VortConfig`; vocabulary and special tokens are the task's unless given.
        seed: of the weights.
    """
    import torch
    from torch import nn

    from vort.lab.tasks import embed_parts
    from vort.models import VortForCausalLM

    if settings.get("memory") == "gla":
        _import_gla_kernels()
    torch.manual_seed(seed)
    model: Any = VortForCausalLM(model_config(task, settings))
    if task.parts is not None:
        embed_parts(model, task)
    if task.num_classes < task.vocab_size:
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


def _import_gla_kernels() -> None:
    """Import the kernels behind memory="gla", where they are installed and a GPU would run them."""
    import torch

    if torch.cuda.is_available() and importlib.util.find_spec("fla") is not None:
        with few_configurations():
            importlib.import_module("fla.ops.gla")
