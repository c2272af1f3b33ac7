"""The parallel form, in PyTorch: `minimal` in bounded memory, forward and backward by hand.

Inside a chunk retention is one masked matrix product (`weights`); between chunks only the states
count (`piece`). A piece is a run of chunks whose temporaries fit a fixed workspace (`layout`), so
memory beyond inputs and outputs is that workspace plus one state for each piece. Where few tokens
read, a chunk has a few slots for them (`readers`), or there are no states at all (`pairs`).
The backward pass (`passes`) has the states before every chunk where they are few. Else it computes
those inside a piece again from the one it starts with: storing them all would take S K V / C
numbers per token and head, three times q, k and v together at S = 8, K = V = C = 64.
"""

from vort.ops.retention.chunk.op import (
    AskedInputs,
    retention_chunk,
    retention_of_asked,
)

__all__ = ["AskedInputs", "retention_chunk", "retention_of_asked"]
