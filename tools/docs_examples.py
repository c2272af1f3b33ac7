"""For the documentation site: doctests in docstrings are shown as code.

mkdocs.yml names this file as an extension of griffe. Docstrings here end in a bare doctest, which
its parser would take for prose: a quotation, with every list in it a link that leads nowhere.
"""

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)


def as_section(doctest: re.Match[str]) -> str:
    """The doctest under a heading that the parser knows."""
    return "Examples:\n" + "\n".join(f"    {line}" for line in doctest[0].splitlines())


class Examples(griffe.Extension):
    """Puts every doctest under `Examples:`."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each module, class, function and attribute that is read."""
        if obj.docstring is not None and "Examples:" not in obj.docstring.value:
            obj.docstring.value = _DOCTEST.sub(as_section, obj.docstring.value)
