"""Layers built from ops and memories: `VortAttention` is what to put into a block."""

from vort.layers.cache import LayerStates, StateStore
from vort.layers.norm import RMSNorm
from vort.layers.short_convolution import ShortConvolution
from vort.layers.vort_attention import VortAttention

__all__ = ["LayerStates", "RMSNorm", "ShortConvolution", "StateStore", "VortAttention"]
