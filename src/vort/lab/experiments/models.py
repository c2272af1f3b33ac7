"""The rows of the tables: models by name, each as settings of `VortConfig`."""

from dataclasses import dataclass
from typing import Any

from vort.memories import PAPER

__all__ = ["MODELS", "SLOW", "Model"]

# On a GPU these take several times as long as the others: they come last, lest others wait.
SLOW = ("vort_paper", "gla")

# What VORT adds to retrieval; the ablations give it to the rivals too.
PLAIN: dict[str, Any] = {"write_gate": False, "read_weights": False}
FAVOR: dict[str, Any] = {"feature_map": "favor"}
# The paper's layer, but for what a table sets for all its rows alike: sizes, the router's inputs.
AS_PRINTED: dict[str, Any] = {
    name: PAPER[name]
    for name in ("routing", "feature_map", *PLAIN, "qk_norm", "output_norm", "conv_size")
}


@dataclass(frozen=True)
class Model:
    """A row: what tables call it, its settings, and whose rows of the paper it stands for."""

    label: str
    settings: dict[str, Any]
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
