"""The paper's tables and figures as experiments: the one list of them, in the order they run.

A new table is a file with an `Experiment` (and its task, if that is new) and a line here.
"""

from vort.lab.experiments.ablations import ABLATIONS
from vort.lab.experiments.books import BOOKS
from vort.lab.experiments.books_deep import BOOKS_DEEP, BOOKS_DEEPER
from vort.lab.experiments.books_research import BOOKS_RESEARCH
from vort.lab.experiments.complexity import COMPLEXITY
from vort.lab.experiments.entities import ENTITIES
from vort.lab.experiments.experiment import Experiment
from vort.lab.experiments.kernel import KERNEL
from vort.lab.experiments.merged import MERGED
from vort.lab.experiments.mqar import MQAR_TABLE
from vort.lab.experiments.needles import DECODING, NEEDLES
from vort.lab.experiments.orders import ORDERS
from vort.lab.experiments.plasticity import PLASTICITY
from vort.lab.experiments.recall import LABEL_COPY, LITERAL, PILOT
from vort.lab.experiments.ruler import RULER_TABLE
from vort.lab.experiments.scan_babi import BABI_TABLE, SCAN_TABLE

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        KERNEL,
        PILOT,
        LABEL_COPY,
        LITERAL,
        BOOKS,
        BOOKS_DEEP,
        BOOKS_DEEPER,
        BOOKS_RESEARCH,
        ENTITIES,
        ABLATIONS,
        NEEDLES,
        DECODING,
        MQAR_TABLE,
        MERGED,
        RULER_TABLE,
        SCAN_TABLE,
        BABI_TABLE,
        COMPLEXITY,
        ORDERS,
        PLASTICITY,
    )
}
