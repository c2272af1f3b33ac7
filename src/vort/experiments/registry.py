"""The experiments by name, in the order they run."""

from vort.experiments.ablations import ABLATIONS
from vort.experiments.books import BOOKS
from vort.experiments.complexity import COMPLEXITY
from vort.experiments.experiment import Experiment
from vort.experiments.label_copy import LABEL_COPY
from vort.experiments.orders import ORDERS
from vort.experiments.pilot import PILOT
from vort.experiments.plasticity_table import PLASTICITY

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (PILOT, LABEL_COPY, BOOKS, ABLATIONS, COMPLEXITY, ORDERS, PLASTICITY)
}
