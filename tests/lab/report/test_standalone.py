import json
import re

from hypothesis import given
from hypothesis import strategies as st

from vort.lab.report.standalone import safe_json, standalone_page


@given(st.recursive(st.text() | st.integers() | st.none(), lambda inner: st.lists(inner)))
def test_json_in_a_page_reads_back_and_never_ends_its_element(data: object) -> None:
    text = safe_json({"it": data})
    assert json.loads(text)["it"] == data
    assert not set("<>&") & set(text)
    assert text.isascii()


def test_page_forbids_every_request_and_all_scripts_but_its_own() -> None:
    page = standalone_page("<t>", "<p>", styles=["base.css"], scripts=["report.js"], data={})
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "http" not in re.sub(r"http-equiv|http://www.w3.org/2000/svg", "", page)
    assert "<title>&lt;t&gt;</title>" in page
