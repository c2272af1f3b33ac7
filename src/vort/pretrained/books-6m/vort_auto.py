"""Where transformers finds the classes of this model: in the package vort."""

from vort.models import ByteTokenizer, VortConfig, VortForCausalLM, VortModel

__all__ = ["ByteTokenizer", "VortConfig", "VortForCausalLM", "VortModel"]
