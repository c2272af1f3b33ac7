"""Retention: one op for power-law memory, the paper's banks and every exponential baseline.

`retention` is what to call; `retention_step` is one token of it. The folder reads from the
definition outwards: `exact` (every pair), `recurrent` (every step), `minimal` (the parallel form on
one page), `chunk` (the same in bounded memory, its backward by hand), `triton` (on a GPU, imported
on first use). A call is checked and packed into `inputs` once; backends take it whole.
"""

from vort.ops.retention.exact import exact_retention_with_kernel
from vort.ops.retention.inputs import DEFAULT_EPS, NORMALIZERS, Normalizer
from vort.ops.retention.interface import BACKENDS, Backend, explain_backend, retention
from vort.ops.retention.minimal import retention_minimal
from vort.ops.retention.recurrent import retention_step
from vort.ops.retention.routing import paper_banks, shared_basis
from vort.ops.retention.state import RetentionState, empty_state

__all__ = [
    "BACKENDS",
    "DEFAULT_EPS",
    "NORMALIZERS",
    "Backend",
    "Normalizer",
    "RetentionState",
    "empty_state",
    "exact_retention_with_kernel",
    "explain_backend",
    "paper_banks",
    "retention",
    "retention_minimal",
    "retention_step",
    "shared_basis",
]
