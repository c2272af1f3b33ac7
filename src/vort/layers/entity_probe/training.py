"""Fit the linear probe: L2-regularised logistic regression, tuned on validation novels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.sparse import csr_matrix, vstack
from scipy.special import expit

from vort.layers.entity_probe.features import feature_ids
from vort.layers.entity_probe.linear_probe import LinearProbe
from vort.layers.entity_probe.litbank import Novel
from vort.layers.entity_probe.scoring import score_probe
from vort.layers.entity_probe.words import Words

BUCKETS = 1 << 15
PENALTIES = (0.3, 1.0, 3.0)
THRESHOLDS = tuple(round(0.1 * step, 1) for step in range(-10, 6))
_MAX_ITERATIONS = 80


@dataclass(frozen=True)
class Fit:
    """A fitted probe and the settings that validation chose."""

    probe: LinearProbe
    penalty: float
    validation_f1: float


def fit_probe(
    train: Sequence[Novel],
    validation: Sequence[Novel],
    *,
    causal: bool,
    buckets: int = BUCKETS,
    penalties: Sequence[float] = PENALTIES,
    on_step: Callable[[], None] = lambda: None,
) -> Fit:
    """Choose penalty and threshold on `validation`, then refit on both.

    Args:
        train: novels to learn from.
        validation: novels to choose by.
        causal: use features of the word and what precedes it alone.
        buckets: size of the hash table.
        penalties: L2 strengths to try.
        on_step: called after each of the `len(penalties) + 1` fits.
    """
    best = Fit(LinearProbe(np.zeros(buckets, np.float32), causal=causal), penalties[0], -1.0)
    examples = _examples(train, buckets, causal)
    for penalty in penalties:
        weights = _logistic_regression(*examples, penalty)
        for threshold in THRESHOLDS:
            probe = LinearProbe(weights, threshold, causal=causal)
            f1 = score_probe(probe, validation).f1
            if f1 > best.validation_f1:
                best = Fit(probe, penalty, f1)
        on_step()
    both = _examples([*train, *validation], buckets, causal)
    weights = _logistic_regression(*both, best.penalty)
    on_step()
    final = LinearProbe(weights, best.probe.threshold, causal=causal)
    return Fit(final, best.penalty, best.validation_f1)


def _examples(
    novels: Sequence[Novel], buckets: int, causal: bool
) -> tuple[csr_matrix, NDArray[np.float64]]:
    """One row of features and one label per capitalised word."""
    rows, labels = [], []
    for novel in novels:
        words = Words.of(novel.text)
        ids, offsets = feature_ids(words, buckets, causal=causal)
        ones = np.ones(len(ids))
        bounds = np.append(offsets, len(ids))
        rows.append(csr_matrix((ones, ids, bounds), shape=(len(offsets), buckets)))
        labels.append(_labels(novel, words))
    return vstack(rows).tocsr(), np.concatenate(labels)


def _labels(novel: Novel, words: Words) -> NDArray[np.float64]:
    named = np.zeros(len(novel.text) + 1)
    for (start, end), is_name in zip(novel.spans, novel.names, strict=True):
        named[start + 1 : end + 1] = is_name
    before = np.cumsum(named)
    spans = np.array([words.spans[i] for i in words.capitalised], dtype=np.int64).reshape(-1, 2)
    inside: NDArray[np.float64] = (before[spans[:, 1]] > before[spans[:, 0]]).astype(np.float64)
    return inside


def _logistic_regression(
    features: csr_matrix, labels: NDArray[np.float64], penalty: float
) -> NDArray[np.float32]:
    used = np.unique(features.indices)  # the penalty keeps all other weights at zero
    compact = features[:, used]
    transposed = compact.T.tocsr()

    def loss(weights: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        odds = compact @ weights
        value = np.logaddexp(0.0, odds).sum() - labels @ odds + 0.5 * penalty * weights @ weights
        return float(value), transposed @ (expit(odds) - labels) + penalty * weights

    options = {"maxiter": _MAX_ITERATIONS}
    solution = minimize(loss, np.zeros(len(used)), jac=True, method="L-BFGS-B", options=options)
    weights = np.zeros(features.shape[1], dtype=np.float32)
    # Rounded as they will be stored, so that what is judged is what is shipped.
    weights[used] = solution.x.astype(np.float16)
    return weights
