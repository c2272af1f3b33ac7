"""Tensor programs: pure functions over tensors, one folder for each op.

Here `retention` is the function; its folder's files are reached as
`from vort.ops.retention import ...`.
"""

from vort.ops.feature_maps import FeatureMap, feature_map
from vort.ops.gpu.launcher import without_kernels
from vort.ops.local_attention import LocalState, apply_rope, attend_locally, local_attention
from vort.ops.order_weights import order_weights
from vort.ops.retention import (
    RetentionState,
    empty_state,
    exact_retention_with_kernel,
    explain_backend,
    paper_banks,
    retention,
    retention_step,
    shared_basis,
)
from vort.ops.rms_norm import rms_norm

__all__ = [
    "FeatureMap",
    "LocalState",
    "RetentionState",
    "apply_rope",
    "attend_locally",
    "empty_state",
    "exact_retention_with_kernel",
    "explain_backend",
    "feature_map",
    "local_attention",
    "order_weights",
    "paper_banks",
    "retention",
    "retention_step",
    "rms_norm",
    "shared_basis",
    "without_kernels",
]
