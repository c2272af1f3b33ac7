"""One HTML file that needs nothing else: styles, scripts and data inside, requests forbidden.

The templates in `pages/` escape every value. What may stand on a page as it is (`Markup`) is made
here and nowhere else: the package's own styles and scripts, and data as `safe_json` writes it.
"""

import base64
import hashlib
import json
import math
import unicodedata
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

__all__ = ["one_line", "safe_json", "shown", "standalone_page", "visible"]


def standalone_page(
    template: str,
    *,
    title: str,
    styles: Sequence[str],
    scripts: Sequence[str],
    data: Mapping[str, Any],
    blocks: Mapping[str, str] | None = None,
    **values: Any,
) -> str:
    """The whole page as text; its content security policy allows these scripts and no request.

    Args:
        template: name of a file in `vort/lab/report/pages` that extends `standalone.html`.
        title: of the window.
        styles: names of files there.
        scripts: the same, run in this order once the body is there.
        data: what `JSON.parse(document.getElementById("data").textContent)` gives the scripts.
        blocks: further data by id, base64 text that a script decodes when it needs it.
        values: what the template shows.
    """
    style = "\n".join(map(_read_part, styles))
    # One scope of their own, which the files share and the page's window does not see.
    script = "(() => {\n" + "\n".join(map(_read_part, scripts)) + "})();"
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return (
        _templates()
        .get_template(template)
        .render(
            title=title,
            policy=Markup(policy),
            style=Markup(style),
            script=Markup(script),
            data=safe_json(data),
            blocks=blocks or {},
            **values,
        )
    )


def safe_json(data: Any) -> Markup:
    r"""JSON that cannot end the script element it stands in, whatever text it holds.

    Numbers that JSON has no name for (NaN, infinities) become null.

    >>> print(safe_json({"text": "</script><!--", "loss": float("nan")}))
    {"text":"\u003c/script\u003e\u003c!--","loss":null}
    """
    text = json.dumps(_finite(data), ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def shown(value: Any) -> str:
    """What stands on a page for a value, before it is escaped: numbers short, None as nothing.

    >>> shown(12345), shown(0.123456), shown(None), shown("<b>")
    ('12,345', '0.1235', '', '<b>')
    """
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def visible(text: str) -> str:
    r"""The text with every character that has no shape, or that would move others, as a symbol.

    Controls get their names (⟨NUL⟩), a new line its arrow and the line break itself, marks of
    direction and other formats their code (⟨U+202E⟩), combining marks a circle to sit on.

    >>> visible("a\x07\u202eb")
    'a⟨BEL⟩⟨U+202E⟩b'
    """
    return "".join(map(_visible_character, text))


def _visible_character(character: str) -> str:
    code = ord(character)
    if character == "\n":
        return "↵\n"
    if character == "\t":
        return "⇥\t"
    if code in _NAMES:
        return f"⟨{_NAMES[code]}⟩"
    category = unicodedata.category(character)
    selects_shape = 0xFE00 <= code <= 0xFE0F or 0xE0100 <= code <= 0xE01EF
    if selects_shape or category in _SHAPELESS or (category == "Zs" and character != " "):
        return f"⟨U+{code:04X}⟩"
    if category in _COMBINING:
        return "◌" + character
    return character


def one_line(value: Any) -> str:
    r"""A command, a path, a name: what moves or hides other characters is shown and not obeyed.

    What is copied from a page is then what stood there, and ends no line of a terminal.

    >>> one_line("rm \u202etxt.exe\nls")
    'rm ⟨U+202E⟩txt.exe↵ls'
    """
    # Unlike in a text, a mark stays on its letter: the name of a file must not change.
    marks = (unicodedata.category(character) in _COMBINING for character in shown(value))
    found = zip(shown(value), marks, strict=True)
    words = "".join(c if mark else _visible_character(c) for c, mark in found)
    return words.replace("\n", "").replace("\t", "")


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("vort.lab.report", "pages"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["one_line"] = one_line
    return environment


def _read_part(name: str) -> str:
    return (resources.files("vort.lab.report") / "pages" / name).read_text(encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _digest(text: str) -> str:
    found = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(found).decode()}"


# Their pictures (U+2400 and on) are missing from many fonts; names are not.
_CONTROLS = (
    "NUL SOH STX ETX EOT ENQ ACK BEL BS HT LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN "
    "EM SUB ESC FS GS RS US"
)
_NAMES = dict(enumerate(_CONTROLS.split())) | {0x7F: "DEL", 0xA0: "NBSP"}
# Control, format, surrogate, private use, unassigned; line and paragraph separators.
_SHAPELESS = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_COMBINING = frozenset({"Mn", "Me"})
