"""Sequences and weights over several devices, for the engines of torch.distributed.

`context_parallel` cuts sequences over the ranks of a `DeviceMesh`. Data parallel, FSDP2 and tensor
parallel are PyTorch's and Transformers' own; docs/distributed.md says how they go together.
"""

from vort.distributed.context import context_parallel, part_of

__all__ = ["context_parallel", "part_of"]
