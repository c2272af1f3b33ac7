"""Sequence models with power-law memory.

`vort.fractional` is the mathematics, `vort.ops` the tensor programs built on it.
"""

__version__ = "0.1.0"
