"""VORT itself among its rivals: the memory of `vort.layers`, under the interface of this folder."""

from vort.layers.vort_memory import VortMemory

__all__ = ["VortMemory"]
