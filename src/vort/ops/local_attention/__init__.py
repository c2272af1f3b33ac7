"""Causal sliding-window softmax attention with the entropy of every row (eq. routing).

`local_attention` for whole sequences, `local_attention_prefill` and `local_attention_step` for
decoding with a ring buffer of the window. `exact.py` is the quadratic form they are tested
against, `block.py` the linear one, `triton/` the same fused into GPU kernels.
"""

from .attention import LocalBackend, local_attention
from .cache import LocalAttentionCache, local_attention_prefill, local_attention_step
from .exact import local_attention_exact
from .rope import apply_rope

__all__ = [
    "LocalAttentionCache",
    "LocalBackend",
    "apply_rope",
    "local_attention",
    "local_attention_exact",
    "local_attention_prefill",
    "local_attention_step",
]
