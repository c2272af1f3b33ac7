"""Sequence models with power-law memory.

`vort.fractional` is the mathematics, `vort.ops` the tensor programs built on it, `vort.memories`
what a layer may keep of the past, `vort.layers` the modules, `vort.models` the Hugging Face model.
What most users need is importable from here, and loaded when it is asked for: `import vort` alone
needs torch, numpy and scipy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from vort.fractional import PowerLawBasis
    from vort.layers import LayerStates, VortAttention
    from vort.memories import LayerSettings, Memory, MemoryInputs, MemoryOutput
    from vort.models import (
        ByteTokenizer,
        VortCache,
        VortConfig,
        VortForCausalLM,
        VortModel,
        VortSession,
    )
    from vort.ops import (
        explain_backend,
        feature_map,
        local_attention,
        paper_banks,
        retention,
        retention_step,
        shared_basis,
    )
    from vort.pretrained import pretrained_path

__all__ = [
    "ByteTokenizer",
    "LayerSettings",
    "LayerStates",
    "Memory",
    "MemoryInputs",
    "MemoryOutput",
    "PowerLawBasis",
    "VortAttention",
    "VortCache",
    "VortConfig",
    "VortForCausalLM",
    "VortModel",
    "VortSession",
    "explain_backend",
    "feature_map",
    "local_attention",
    "paper_banks",
    "pretrained_path",
    "retention",
    "retention_step",
    "shared_basis",
]
# Each after those it builds on, so that what needs torch alone loads nothing more.
_ROOMS = ("pretrained", "fractional", "ops", "memories", "layers", "models")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for room in _ROOMS:
            module = import_module(f"vort.{room}")
            if name in module.__all__:
                globals()[name] = getattr(module, name)
                return globals()[name]
    raise AttributeError(f"module 'vort' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
