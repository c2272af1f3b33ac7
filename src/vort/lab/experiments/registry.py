"""The experiments by name, in the order they run."""

from vort.lab.experiments.ablations import ABLATIONS
from vort.lab.experiments.books import BOOKS
from vort.lab.experiments.complexity import COMPLEXITY
from vort.lab.experiments.experiment import Experiment
from vort.lab.experiments.label_copy import LABEL_COPY
from vort.lab.experiments.orders import ORDERS
from vort.lab.experiments.pilot import PILOT
from vort.lab.experiments.plasticity_table import PLASTICITY

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (PILOT, LABEL_COPY, BOOKS, ABLATIONS, COMPLEXITY, ORDERS, PLASTICITY)
}
