"""One HTML file that needs nothing else: styles, scripts and data inside, requests forbidden.

The templates in `pages/` escape every value. What may stand on a page as it is (`Markup`) is made
here and nowhere else: the package's own styles and scripts, and data as `safe_json` writes it.
"""

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

__all__ = ["safe_json", "shown", "standalone_page"]


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


@cache
def _templates() -> Environment:
    return Environment(
        loader=PackageLoader("vort.lab.report", "pages"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


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
