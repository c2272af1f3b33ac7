"""Causal sliding-window softmax attention with the entropy of every row (eq. routing).

`local_attention` for whole sequences, `attend_locally` for those that go on: decoding, pieces, rows
of different length, with a `LocalState` of one window. `exact.py` is the quadratic form they are
tested against, `block.py` the linear one, `triton/` the same fused into GPU kernels.
"""

from .attention import LocalBackend, local_attention
from .exact import local_attention_exact
from .local import LocalState, attend_locally
from .rope import apply_rope

__all__ = [
    "LocalBackend",
    "LocalState",
    "apply_rope",
    "attend_locally",
    "local_attention",
    "local_attention_exact",
]
