"""A page that needs nothing and lets nothing in."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError

import vort.lab.report
from vort.lab.report.standalone import safe_json, standalone_page

REPORT = Path(vort.lab.report.__file__).parent


def page_of(title: str, **values: Any) -> str:
    parts: dict[str, Any] = {"styles": ["base.css"], "scripts": ["report.js"]}
    return standalone_page("lens.html", title=title, **{"data": {}, **parts, **values})


@given(st.recursive(st.text() | st.integers() | st.none(), lambda inner: st.lists(inner)))
def test_json_in_a_page_reads_back_and_never_ends_its_element(data: object) -> None:
    text = safe_json({"it": data})
    assert json.loads(text)["it"] == data
    assert not set("<>&") & set(text)
    assert text.isascii()


def test_page_forbids_every_request_and_all_scripts_but_its_own() -> None:
    page = page_of("<t>")
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "http" not in re.sub(r"http-equiv|http://www.w3.org/2000/svg", "", page)
    assert "<title>&lt;t&gt;</title>" in page


@pytest.mark.parametrize("bad", ["</script><!--", "\"'><b>", "{{ 7*7 }}", "\u2028\u2029"])
def test_titles_blocks_and_data_cannot_leave_their_place(bad: str) -> None:
    page = page_of(bad, data={bad: bad}, blocks={bad: bad})
    plain = page_of("t", data={"d": "d"}, blocks={"b": "b"})
    for mark in ("<script", "</script", "<b>", "<!--", "<title"):
        assert page.count(mark) == plain.count(mark)
    (data,) = re.findall(r'id="data">(.*)</script>', page)
    assert json.loads(data) == {bad: bad}
    assert "49" not in re.findall(r"<title>(.*)</title>", page)[0]


def test_a_template_that_lacks_a_value_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="subtitle"):
        standalone_page("report.html", title="t", styles=[], scripts=[], data={}, tallies=[])


def test_trusted_text_is_made_in_one_file_and_no_template_trusts_any() -> None:
    makers = {path.name for path in REPORT.rglob("*.py") if "Markup" in path.read_text()}
    assert makers == {"standalone.py"}
    templates = [path.read_text() for path in REPORT.glob("pages/*.html")]
    assert len(templates) == 3
    assert not any(re.search(r"\|\s*safe|autoescape", text) for text in templates)
