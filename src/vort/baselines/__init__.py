"""The memories that VORT is compared with, one file each, behind one interface.

Each is a `Memory` (`forward`, `step`, `state_size`) and takes VORT's place in the same layer:
`VortAttention(..., memory=build_memory("mixture", settings))`, or `VortConfig(memory="mixture")`.
"""

from vort.baselines.exact_power_law import ExactPowerLawMemory
from vort.baselines.exponential import ExponentialMemory
from vort.baselines.factory import MEMORIES, STATELESS, MemorySettings, build_memory
from vort.baselines.gla import GatedLinearMemory
from vort.baselines.heavy_hitters import HeavyHitterMemory
from vort.baselines.mixture import MixtureMemory
from vort.baselines.none import NoMemory
from vort.baselines.softmax import SoftmaxMemory
from vort.baselines.uniform_power_law import UniformPowerLawMemory
from vort.baselines.vort import VortMemory
from vort.layers.memory import Memory, MemoryInputs, MemoryOutput

__all__ = [
    "MEMORIES",
    "STATELESS",
    "ExactPowerLawMemory",
    "ExponentialMemory",
    "GatedLinearMemory",
    "HeavyHitterMemory",
    "Memory",
    "MemoryInputs",
    "MemoryOutput",
    "MemorySettings",
    "MixtureMemory",
    "NoMemory",
    "SoftmaxMemory",
    "UniformPowerLawMemory",
    "VortMemory",
    "build_memory",
]
