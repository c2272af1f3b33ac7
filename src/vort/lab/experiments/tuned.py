"""Learning rates (and Exponential's decay rate) for each model, found on validation data.

Every model gets the same number of trials of the same length: most try learning rates alone,
Exponential fewer of them at several decay rates. What came out is in `tuned.json`, with all trials;
`vort tune` makes it anew. The test split plays no part.
"""

import json
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

__all__ = ["trials_for", "tuned"]

# Learning rates for most models, and for those that try several decay rates as well.
_RATES: dict[str, tuple[float, ...]] = {
    "laptop": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3e-3, 6e-3),
    "paper": (1e-3, 2e-3, 3e-3, 4e-3, 8e-3, 1.6e-2),
}
_FEW_RATES = {"laptop": (4e-3, 8e-3), "paper": (2e-3, 4e-3)}
# Time constants as shares of the length: half the lags of the pilot are below its square root,
# those of label copy are uniform.
_SHARES: dict[str, dict[str, tuple[float, ...]]] = {
    "laptop": {"pilot": (0.01, 0.03, 0.1, 0.3), "label_copy": (0.1, 0.3, 1.0, 3.0)},
    "paper": {"pilot": (0.01, 0.03, 0.1), "label_copy": (0.1, 0.3, 1.0)},
}


def trials_for(experiment: str, scale: str, model: str, length: int) -> list[dict[str, Any]]:
    """The settings to try: `learning_rate`, and for Exponential `exponential_rate`.

    >>> [len(trials_for("pilot", "laptop", name, 1000)) for name in ("vort", "exponential")]
    [8, 8]
    """
    shares = _SHARES[scale].get(experiment)
    if not model.startswith("exponential") or shares is None:
        return [{"learning_rate": rate} for rate in _RATES[scale]]
    return [
        {"learning_rate": rate, "exponential_rate": 1 / (share * length)}
        for rate in _FEW_RATES[scale]
        for share in shares
    ]


@cache
def _record() -> dict[str, Any]:
    text = files("vort.lab.experiments").joinpath("tuned.json").read_text()
    found: dict[str, Any] = json.loads(text)
    return found


def tuned(experiment: str, scale: str, model: str, default: float) -> dict[str, Any]:
    """The best settings of a model; those of the nearest kin where it was not tuned itself.

    Ablations of a model take the model's own: a different rate would be a second difference.

    default: the learning rate where the experiment was never tuned at this scale.
    """
    found = _record().get(scale, {}).get(experiment, {})
    for name in _kin(model, list(found)):
        best: dict[str, Any] = found[name]["best"]
        return dict(best)
    return {"learning_rate": default}


def _kin(model: str, names: Sequence[str]) -> Iterator[str]:
    """The model itself, then those whose name begins its own, longest first."""
    yield from sorted((n for n in names if model == n or model.startswith(f"{n}_")), key=len)[::-1]
