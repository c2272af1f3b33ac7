"""One HTML file that needs nothing else: styles, scripts and data inside, requests forbidden."""

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

__all__ = ["read_part", "safe_json", "standalone_page"]


def standalone_page(
    title: str,
    body: str,
    *,
    styles: Sequence[str],
    scripts: Sequence[str],
    data: Mapping[str, Any],
    blocks: Mapping[str, str] | None = None,
) -> str:
    """The whole page as text; its content security policy allows these scripts and no request.

    Args:
        title: plain text, escaped here.
        body: HTML, escaped by whoever wrote it.
        styles: names of files in `vort/report/pages`.
        scripts: the same, run in this order once the body is there.
        data: what `JSON.parse(document.getElementById("data").textContent)` gives the scripts.
        blocks: further data by id, base64 text that a script decodes when it needs it.
    """
    style = "\n".join(map(read_part, styles))
    # One scope of their own, which the files share and the page's window does not see.
    script = "(() => {\n" + "\n".join(map(read_part, scripts)) + "})();"
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    kept = "\n".join(
        f'<script type="text/plain" id="{escape(name)}">{text}</script>'
        for name, text in (blocks or {}).items()
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
{body}
<script type="application/json" id="data">{safe_json(data)}</script>
{kept}
<script>{script}</script>
</body>
</html>
"""


def read_part(name: str) -> str:
    """The text of a file in `vort/report/pages`."""
    return (resources.files("vort.lab.report") / "pages" / name).read_text(encoding="utf-8")


def safe_json(data: Any) -> str:
    r"""JSON that cannot end the script element it stands in, whatever text it holds.

    Numbers that JSON has no name for (NaN, infinities) become null.

    >>> safe_json({"text": "</script><!--", "loss": float("nan")})
    '{"text":"\\u003c/script\\u003e\\u003c!--","loss":null}'
    """
    text = json.dumps(_finite(data), ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


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
