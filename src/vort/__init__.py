"""Sequence models with power-law memory.

`vort.fractional` is the mathematics, `vort.ops` the tensor programs built on it, `vort.layers` the
modules, `vort.models` the Hugging Face model. What most users need is importable from here, and
loaded when it is asked for: `import vort` alone needs torch, numpy and scipy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from vort.fractional import PowerLawBasis
    from vort.layers import VortAttention
    from vort.models import (
        ByteTokenizer,
        VortConfig,
        VortForCausalLM,
        VortModel,
        VortSession,
    )
    from vort.ops import retention

_HOMES = {
    "PowerLawBasis": "vort.fractional",
    "VortAttention": "vort.layers",
    "retention": "vort.ops",
    "ByteTokenizer": "vort.models",
    "VortConfig": "vort.models",
    "VortForCausalLM": "vort.models",
    "VortModel": "vort.models",
    "VortSession": "vort.models",
}

__all__ = [
    "ByteTokenizer",
    "PowerLawBasis",
    "VortAttention",
    "VortConfig",
    "VortForCausalLM",
    "VortModel",
    "VortSession",
    "retention",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vort' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
