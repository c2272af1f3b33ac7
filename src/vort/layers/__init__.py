"""Layers built from ops and memories: `VortAttention` is what to put into a block."""

from vort.layers.cache import LayerStates
from vort.layers.parts import RMSNorm, ShortConvolution
from vort.layers.vort_attention import VortAttention

__all__ = ["LayerStates", "RMSNorm", "ShortConvolution", "VortAttention"]
