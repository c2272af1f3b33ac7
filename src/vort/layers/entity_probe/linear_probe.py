"""Names by a linear classifier over hashed word features, with weights that come with vort."""

import json
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vort.layers.entity_probe.features import feature_ids
from vort.layers.entity_probe.protocol import Span
from vort.layers.entity_probe.words import Words, join_neighbours

FORMAT = "vort-linear-probe-1"
_SHIPPED = "linear_probe.safetensors"
_TABLES = {False: "full", True: "causal"}


class LinearProbe:
    """A shallow probe: logistic regression over shape, context and document features of a word.

    Capitalised words are the candidates. Features are hashed into one table, so the file holds
    no words. Trained by `vort probe train` on LitBank's proper names; `metadata` says how, and
    what it scores on novels it never saw.

    Args:
        weights: `[buckets]`, one weight per hash bucket.
        threshold: log-odds above which a word is a name.
        causal: the weights are for features of the word and what precedes it alone.
        metadata: where the weights come from.

    >>> text = "They saw Anne and Captain Wentworth in Bath."
    >>> [text[a:b] for a, b in LinearProbe.pretrained().probe(text)]
    ['Anne', 'Captain Wentworth', 'Bath']
    """

    def __init__(
        self,
        weights: NDArray[np.float32],
        threshold: float = 0.0,
        *,
        causal: bool = False,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        if weights.ndim != 1 or not len(weights):
            raise ValueError(f"weights must have shape [buckets], got {list(weights.shape)}")
        self.weights = weights
        self.threshold = threshold
        self.causal = causal
        self.metadata = metadata or {}

    @classmethod
    def pretrained(cls, *, causal: bool = False) -> "LinearProbe":
        """The probe that comes with vort."""
        return shipped_probe(causal)

    @classmethod
    def load(cls, path: str | Path, *, causal: bool = False) -> "LinearProbe":
        """One of the two probes in a file written by `vort probe train`."""
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as missing:
            raise ImportError("LinearProbe needs safetensors: pip install 'vort[hf]'") from missing
        try:
            with safe_open(str(path), framework="numpy") as stored:
                metadata = stored.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise ValueError(
                        f"{path} is not a probe of this version: its format must be {FORMAT!r}, "
                        f"got {metadata.get('format')!r}"
                    )
                weights = stored.get_tensor(_TABLES[causal])
        except SafetensorError as problem:
            raise ValueError(f"{path} is damaged or no safetensors file: {problem}") from problem
        about = json.loads(metadata["about"])
        threshold = float(about["threshold"][_TABLES[causal]])
        return cls(weights.astype(np.float32), threshold, causal=causal, metadata=about)

    def log_odds(self, words: Words) -> NDArray[np.float32]:
        """Log-odds of being a name, one per capitalised word of `words`."""
        if not words.capitalised:
            return np.zeros(0, dtype=np.float32)
        ids, offsets = feature_ids(words, len(self.weights), causal=self.causal)
        odds: NDArray[np.float32] = np.add.reduceat(self.weights[ids], offsets)
        return odds

    def probe(self, text: str) -> list[Span]:
        """Character spans of the names in `text`; word by word when causal."""
        words = Words.of(text)
        chosen = np.flatnonzero(self.log_odds(words) > self.threshold)
        names = [words.capitalised[i] for i in chosen]
        return [words.spans[i] for i in names] if self.causal else join_neighbours(words, names)


def save_probes(path: str | Path, full: LinearProbe, causal: LinearProbe, about: Any) -> None:
    """Write both probes to one safetensors file, weights in half precision."""
    from safetensors.numpy import save_file

    thresholds = {"full": full.threshold, "causal": causal.threshold}
    metadata = {"format": FORMAT, "about": json.dumps(about | {"threshold": thresholds})}
    tables = {_TABLES[p.causal]: p.weights.astype(np.float16) for p in (full, causal)}
    save_file(tables, str(path), metadata=metadata)


@lru_cache
def shipped_probe(causal: bool) -> LinearProbe:
    """The probe that comes with vort, read once."""
    with resources.as_file(resources.files(__package__) / _SHIPPED) as path:
        return LinearProbe.load(path, causal=causal)
