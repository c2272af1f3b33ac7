"""Plasticity: orders that follow from what queries fail to retrieve (section plasticity).

`retrieval_loss` is eq. retrieval-loss in linear memory, `exact` its definition; `refine_orders`
descends on it with the step of theorem plasticity; `retrieval_objective` adds it to training.
"""

from vort.plasticity.descent import Descent, descend
from vort.plasticity.exact import retrieval_loss_exact, retrieval_scores, retrieval_weights
from vort.plasticity.loss import retrieval_loss
from vort.plasticity.objective import (
    memory_features,
    memory_retrieval_loss,
    model_retrieval_loss,
    record_memories,
    retrieval_objective,
)
from vort.plasticity.refinement import LayerScores, order_loss, refine_by_layer, refine_orders
from vort.plasticity.retrievals import Retrievals

__all__ = [
    "Descent",
    "LayerScores",
    "Retrievals",
    "descend",
    "memory_features",
    "memory_retrieval_loss",
    "model_retrieval_loss",
    "order_loss",
    "record_memories",
    "refine_by_layer",
    "refine_orders",
    "retrieval_loss",
    "retrieval_loss_exact",
    "retrieval_objective",
    "retrieval_scores",
    "retrieval_weights",
]
