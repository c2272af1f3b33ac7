"""Layers built from the ops: the router, the memory, and the attention that holds them.

`VortAttention` is what to put into a block; `Memory` is what to subclass for another memory.
"""

from vort.layers.cache import LayerStates, StateStore
from vort.layers.gates import Gates
from vort.layers.memory import Memory, MemoryInputs, MemoryOutput, State
from vort.layers.norm import RMSNorm
from vort.layers.padding import Padding
from vort.layers.retention_memory import RetentionMemory
from vort.layers.router import Router, Routing
from vort.layers.short_convolution import ShortConvolution
from vort.layers.vort_attention import VortAttention
from vort.layers.vort_memory import VortMemory

__all__ = [
    "Gates",
    "LayerStates",
    "Memory",
    "MemoryInputs",
    "MemoryOutput",
    "Padding",
    "RMSNorm",
    "RetentionMemory",
    "Router",
    "Routing",
    "ShortConvolution",
    "State",
    "StateStore",
    "VortAttention",
    "VortMemory",
]
