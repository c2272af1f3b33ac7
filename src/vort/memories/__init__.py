"""The memories, VORT's first among them, one file each behind one interface.

Each is a `Memory` (`forward`, `step`, `state_size`), builds itself from `LayerSettings` and takes
its place in the same layer: `VortAttention(memory="mixture")`, `VortConfig(memory="mixture")`.
"""

from vort.memories.exponential import ExponentialMemory, LinearMemory
from vort.memories.gated_delta import GatedDeltaMemory
from vort.memories.gla import GatedLinearMemory, GatedScalesMemory
from vort.memories.interface import Along, Memory, MemoryInputs, MemoryOutput, State
from vort.memories.mamba2 import Mamba2Memory
from vort.memories.mixture import MixtureMemory
from vort.memories.none import NoMemory
from vort.memories.power_law import ExactPowerLawMemory, UniformPowerLawMemory
from vort.memories.retention_memory import Gates, RetentionMemory, Routing
from vort.memories.settings import PAPER, LayerSettings
from vort.memories.softmax import SoftmaxMemory
from vort.memories.vort import Router, VortMemory

__all__ = [
    "MEMORIES",
    "PAPER",
    "Along",
    "ExactPowerLawMemory",
    "ExponentialMemory",
    "GatedDeltaMemory",
    "GatedLinearMemory",
    "GatedScalesMemory",
    "Gates",
    "LayerSettings",
    "LinearMemory",
    "Mamba2Memory",
    "Memory",
    "MemoryInputs",
    "MemoryOutput",
    "MixtureMemory",
    "NoMemory",
    "RetentionMemory",
    "Router",
    "Routing",
    "SoftmaxMemory",
    "State",
    "UniformPowerLawMemory",
    "VortMemory",
]

# What `LayerSettings.memory` may name; a memory of one's own becomes another by one line more.
MEMORIES: dict[str, type[Memory]] = {
    "vort": VortMemory,
    "exponential": ExponentialMemory,
    "mixture": MixtureMemory,
    "uniform_power_law": UniformPowerLawMemory,
    "softmax": SoftmaxMemory,
    "gla": GatedLinearMemory,
    "linear": LinearMemory,
    "gla_scales": GatedScalesMemory,
    "mamba2": Mamba2Memory,
    "gated_delta": GatedDeltaMemory,
    "none": NoMemory,
    "exact_power_law": ExactPowerLawMemory,
}
