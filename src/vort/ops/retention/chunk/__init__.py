"""The parallel form, in PyTorch.

Inside a chunk retention is one masked matrix product (`lag_weights`, `gated_weights`); between
chunks only the states count (`states`). A segment is a run of chunks whose temporaries fit a fixed
`workspace` (`layout`, `segment`), so memory beyond inputs and outputs is that workspace plus one
state for each segment.
The backward pass computes the states inside a segment again from the one it starts with: storing
them all would take S K V / C numbers per token and head, three times q, k and v together at S = 8,
K = V = C = 64.
"""

from vort.ops.retention.chunk.op import retention_chunk

__all__ = ["retention_chunk"]
