"""VORT as Hugging Face models: configuration, language model, cache, tokenizer, session.

Importing this package registers model and tokenizer with the Auto classes; it needs the extra `hf`.
"""

from vort.models.cache_vort import VortCache
from vort.models.configuration_vort import VortConfig
from vort.models.modeling_vort import VortForCausalLM, VortModel
from vort.models.session import VortSession
from vort.models.tokenization_vort import ByteTokenizer
from vort.models.training import RecordedStep

__all__ = [
    "ByteTokenizer",
    "RecordedStep",
    "VortCache",
    "VortConfig",
    "VortForCausalLM",
    "VortModel",
    "VortSession",
]
