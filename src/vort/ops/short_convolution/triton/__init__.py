"""Heads on a GPU: fused Triton kernels. Import this package only where it is used."""

from .inputs import Inputs
from .op import heads_fused, heads_op, turned_again
from .step import heads_step, turn_table

__all__ = ["Inputs", "heads_fused", "heads_op", "heads_step", "turn_table", "turned_again"]
