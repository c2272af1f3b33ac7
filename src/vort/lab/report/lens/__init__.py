"""The lens: a text as a model's memory holds it, on one page that works offline."""

from vort.lab.report.lens.page import LensText, lens_page
from vort.lab.report.lens.view import memory_in_words, view_text

__all__ = ["LensText", "lens_page", "memory_in_words", "view_text"]
