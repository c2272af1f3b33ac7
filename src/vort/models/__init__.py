"""VORT as Hugging Face models: configuration, language model, cache, tokenizer, session.

Importing this package registers the model with the Auto classes; it needs the extra `hf`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vort.models.cache_vort import VortCache
from vort.models.configuration_vort import VortConfig
from vort.models.modeling_vort import VortForCausalLM, VortModel

if TYPE_CHECKING:
    from vort.models.session import VortSession
    from vort.models.tokenization_vort import ByteTokenizer

__all__ = [
    "ByteTokenizer",
    "VortCache",
    "VortConfig",
    "VortForCausalLM",
    "VortModel",
    "VortSession",
]

_LATER = {
    "ByteTokenizer": "vort.models.tokenization_vort",
    "VortSession": "vort.models.session",
}


def __getattr__(name: str) -> Any:
    """What models do not need themselves is imported when asked for."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)
