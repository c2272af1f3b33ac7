"""What is kept of a trained VORT besides its scores, for the figures of the paper."""

from typing import Any

from vort.lab.experiments.cell import Scale

__all__ = ["looks_at"]

# What `vort figures` draws: one model is enough, and it is small.
_FOR_FIGURES = ("strip", "reads", "by_order")


def looks_at(model: str, seed: int, scale: Scale) -> dict[str, Any]:
    """The `after` of a recall cell: orders of every VORT, more of the laptop's first one.

    >>> sorted(looks_at("vort", 0, "laptop")), looks_at("vort", 1, "laptop")
    (['by_order', 'orders', 'reads', 'strip'], {'orders': {}})
    """
    if model != "vort":
        return {}
    more = _FOR_FIGURES if scale == "laptop" and seed == 0 else ()
    return {"orders": {}} | {name: {} for name in more}
