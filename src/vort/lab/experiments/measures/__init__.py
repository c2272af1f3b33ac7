"""What is measured on a trained model, or on a layer, besides the scores of training itself."""

from collections.abc import Callable
from typing import Any

from vort.lab.experiments.measures.by_order import by_order
from vort.lab.experiments.measures.cost import cost_of_layer
from vort.lab.experiments.measures.heavy_hitters import heavy_hitters
from vort.lab.experiments.measures.lags import by_lag, fine_bounds
from vort.lab.experiments.measures.orders import orders_by_kind
from vort.lab.experiments.measures.precision import precision_of
from vort.lab.experiments.measures.reads import reads
from vort.lab.experiments.measures.strip import strip

__all__ = [
    "AFTER",
    "by_lag",
    "by_order",
    "cost_of_layer",
    "fine_bounds",
    "heavy_hitters",
    "orders_by_kind",
    "precision_of",
    "reads",
    "strip",
]

# Measures that a cell can ask for by name.
AFTER: dict[str, Callable[..., dict[str, Any]]] = {
    "orders": orders_by_kind,
    "h2o": heavy_hitters,
    "strip": strip,
    "reads": reads,
    "by_order": by_order,
}
