"""Tensor programs: pure functions over tensors, one folder for each op.

Here `retention` is the function; its folder's files are reached as
`from vort.ops.retention import ...`.
"""

from vort.ops.feature_maps import FeatureMap, feature_map
from vort.ops.local_attention import (
    LocalAttentionCache,
    apply_rope,
    local_attention,
    local_attention_prefill,
    local_attention_step,
)
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
    "LocalAttentionCache",
    "RetentionState",
    "apply_rope",
    "empty_state",
    "exact_retention_with_kernel",
    "explain_backend",
    "feature_map",
    "local_attention",
    "local_attention_prefill",
    "local_attention_step",
    "order_weights",
    "paper_banks",
    "retention",
    "retention_step",
    "rms_norm",
    "shared_basis",
]
