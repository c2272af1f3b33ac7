"""The report as a person meets it, in headless Chromium."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.lab.report.browser import Browser, Page
from tests.lab.report.cases import make_run, write
from vort.lab.experiments import EXPERIMENTS
from vort.lab.report.run_page import write_report_page

BREAKOUT = "\" autofocus onfocus=\"window.hacked=4\" '><b class='hacked'>"


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    run = make_run(tmp_path / "run")
    bad = "<img src=x onerror=window.hacked=1></script><script>window.hacked=2</script>"
    (run / "evil").mkdir()
    summary = {"title": bad, "about": bad, "notes": [bad, BREAKOUT, "{{ 7*7 }}"]}
    sheet = {"title": BREAKOUT, "headings": [BREAKOUT, bad], "rows": [[bad, BREAKOUT]]}
    figure = {"file": "picture.svg", "caption": BREAKOUT, "command": bad}
    write(run / "evil" / "summary.json", {**summary, "sheets": [sheet], "figures": [figure]})
    svg = '<svg xmlns="http://www.w3.org/2000/svg"><script>parent.hacked=3</script></svg>'
    (run / "evil" / "picture.svg").write_text(svg)
    file = tmp_path / "report.html"
    write_report_page(run, file, EXPERIMENTS)
    opened = browser.open(file)
    opened.wait("document.body.dataset.ready === 'yes'")
    yield opened
    assert opened.complaints() == []
    assert opened.requests() == []
    assert opened.js("window.hacked") is None
    opened.close()


def test_hostile_text_stays_text_between_tags_and_in_attributes(page: Page) -> None:
    assert page.js("document.querySelector('#part-3 img').alt") == BREAKOUT
    labels = "[...document.querySelectorAll('#part-3 [data-label]')].map(x => x.dataset.label)"
    assert BREAKOUT in page.js(labels)
    notes = page.js("[...document.querySelectorAll('#part-3 .notes li')].map(x => x.textContent)")
    assert notes[1:] == [BREAKOUT, "{{ 7*7 }}"]
    assert page.js("document.querySelectorAll('.hacked, [onfocus], #part-3 script').length") == 0


def test_charts_are_drawn_and_pictures_shown(page: Page) -> None:
    charts = page.js("document.querySelectorAll('.plot').length")
    assert charts == 6
    assert page.js("document.querySelectorAll('.plot-area svg').length") == charts
    assert page.js("[...document.images].every(i => i.complete)")
    assert page.js("document.querySelectorAll('#chart-0 polyline.line').length") == 3
    assert page.js("document.querySelectorAll('#chart-0 polygon.band').length") == 3


def test_lag_axis_is_logarithmic(page: Page) -> None:
    places = page.js(
        "[...document.querySelectorAll('#chart-0 .tick.middle')]"
        ".map(t => [t.textContent, Number(t.getAttribute('x'))])"
    )
    names = [name for name, _ in places]
    assert names[:3] == ["10", "100", "1,000"] or names[:3] == ["1", "10", "100"]
    steps = [b[1] - a[1] for a, b in pairwise(places)]
    assert max(steps) - min(steps) < 1


def test_hovering_reads_out_every_model(page: Page) -> None:
    page.hover("#chart-0 .plot-area")
    tip = page.js("document.getElementById('tip').textContent")
    assert tip.startswith("lags ")
    for model in ("vort", "mixture", "exponential"):
        assert model in tip
    assert "%" in tip
    assert page.js("document.querySelectorAll('#chart-0 .dot').length") == 3
    page.hover("h1")
    assert not page.js("document.getElementById('tip').classList.contains('on')")


def test_a_name_in_the_legend_hides_its_line(page: Page) -> None:
    page.click("#chart-0 .keys button")
    assert page.js("document.querySelectorAll('#chart-0 polyline.line').length") == 2
    pressed = "document.querySelector('#chart-0 .keys button').getAttribute('aria-pressed')"
    assert page.js(pressed) == "false"
    page.click("#chart-0 .keys button")
    assert page.js("document.querySelectorAll('#chart-0 polyline.line').length") == 3


def test_arrow_keys_read_a_chart(page: Page) -> None:
    page.js("document.querySelector('#chart-0 .plot-area').focus()")
    page.press("ArrowRight", 2)
    spoken = page.js("document.querySelector('#chart-0 [role=status]').textContent")
    assert spoken.startswith("lags 2 to 3, ")
    page.press("End")
    spoken = page.js("document.querySelector('#chart-0 [role=status]').textContent")
    assert spoken.startswith("lags 8,192 to 16,383")
    page.press("Escape")
    assert not page.js("document.getElementById('tip').classList.contains('on')")


def test_commands_can_be_copied(page: Page) -> None:
    page.click(".command .copy")
    page.wait("document.querySelector('.command .copy').textContent !== 'copy'")


def test_page_fits_a_phone_and_prints(page: Page, tmp_path: Path) -> None:
    page.resize(390, 844, phone=True)
    assert page.js("document.documentElement.scrollWidth") <= 390
    page.wait("document.querySelector('#chart-0 svg').clientWidth <= 390")
    page.prefer("dark")
    assert page.js("getComputedStyle(document.body).backgroundColor") == "rgb(22, 23, 25)"
    page.pdf(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").stat().st_size > 20_000
