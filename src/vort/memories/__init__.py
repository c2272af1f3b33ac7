"""The memories, VORT's first among them, one file each behind one interface.

Each is a `Memory` (`forward`, `step`, `state_size`) and takes its place in the same layer:
`VortAttention(..., memory=build_memory("mixture", settings))`, or `VortConfig(memory="mixture")`.
"""

from vort.memories.exact_power_law import ExactPowerLawMemory
from vort.memories.exponential import ExponentialMemory
from vort.memories.factory import MEMORIES, STATELESS, MemorySettings, build_memory
from vort.memories.gates import Gates
from vort.memories.gla import GatedLinearMemory
from vort.memories.heavy_hitters import HeavyHitterMemory
from vort.memories.interface import Memory, MemoryInputs, MemoryOutput, State
from vort.memories.mixture import MixtureMemory
from vort.memories.none import NoMemory
from vort.memories.retention_memory import RetentionMemory
from vort.memories.router import Router, Routing
from vort.memories.softmax import SoftmaxMemory
from vort.memories.uniform_power_law import UniformPowerLawMemory
from vort.memories.vort_memory import VortMemory

__all__ = [
    "MEMORIES",
    "STATELESS",
    "ExactPowerLawMemory",
    "ExponentialMemory",
    "GatedLinearMemory",
    "Gates",
    "HeavyHitterMemory",
    "Memory",
    "MemoryInputs",
    "MemoryOutput",
    "MemorySettings",
    "MixtureMemory",
    "NoMemory",
    "RetentionMemory",
    "Router",
    "Routing",
    "SoftmaxMemory",
    "State",
    "UniformPowerLawMemory",
    "VortMemory",
    "build_memory",
]
