"""The report as a person meets it, in headless Chromium."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.lab.report.browser import Browser, Page
from tests.lab.report.cases import cell_of, make_run, write
from tests.lab.report.test_run_page import ablations
from vort.lab.experiments import EXPERIMENTS
from vort.lab.report.figures.results import draw_by_lag
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
    page.wait("document.querySelector('.command .copy').textContent !== 'copy'", 5)
    assert page.js("document.querySelector('.command .copy').textContent") == "copied"


def test_twelve_lines_differ_in_colour_dash_or_shape_and_have_names(
    browser: Browser, tmp_path: Path
) -> None:
    file = tmp_path / "many.html"
    write_report_page(ablations(tmp_path / "run", 12), file)
    page = browser.open(file)
    page.wait("document.body.dataset.ready === 'yes'")
    chart = "[...document.querySelectorAll('.plot')].find(x => x.innerText.includes('Variant 11'))"
    looks = page.js(
        f"[...{chart}.querySelectorAll('svg:not([viewBox=\"0 0 34 12\"]) g[data-name]:has(.line)')]"
        ".map(g => { const s = getComputedStyle(g.querySelector('.line'));"
        "return [s.stroke, s.strokeDasharray, s.strokeWidth, g.children[1].tagName"
        " + (g.children[1].getAttribute('points') ?? '').split(' ').length]; })"
    )
    assert len(looks) == 13
    assert len({tuple(look[:2]) for look in looks}) == 13
    for colour in {look[0] for look in looks}:
        same = [look for look in looks if look[0] == colour]
        assert len({look[1] for look in same}) == len(same)
    named = page.js(f"[...{chart}.querySelectorAll('text.name')].map(t => t.textContent)")
    assert sorted(named) == sorted(["VORT (ours)", *(f"Variant {n}" for n in range(12))])
    tops = page.js(
        f"[...{chart}.querySelectorAll('text.name')].map(t => Number(t.getAttribute('y')))"
        ".sort((a, b) => a - b)"
    )
    assert min(b - a for a, b in pairwise(tops)) >= 10
    page.close()


def test_pictures_keep_their_letters_on_a_phone_and_turn_dark(
    browser: Browser, tmp_path: Path
) -> None:
    run, file = make_run(tmp_path / "run"), tmp_path / "pictures.html"
    draw_by_lag(run / "kernel" / "figure.png", {"VORT": [cell_of("vort", 1.0, 0)]}, "by lag")
    write_report_page(run, file)
    page = browser.open(file)
    page.wait("document.body.dataset.ready === 'yes'")
    picture = "document.querySelector('.picture img[width]:not([width=\"0\"])')"
    page.resize(390, 844, phone=True)
    # Drawn at 160 dots an inch with letters of 10 points: at 80, they are 11 pixels high.
    assert page.js(f"{picture}.clientWidth >= 0.45 * {picture}.naturalWidth")
    assert page.js("document.documentElement.scrollWidth") <= 390
    page.prefer("dark")
    assert "invert" in page.js(f"getComputedStyle({picture}.parentElement).filter")
    page.prefer("light")
    assert page.js(f"getComputedStyle({picture}.parentElement).filter") == "none"
    page.resize(1280, 900)
    assert page.js(f"{picture}.clientWidth <= {picture}.parentElement.clientWidth")
    page.close()


def test_page_fits_a_phone_and_prints(page: Page, tmp_path: Path) -> None:
    page.resize(390, 844, phone=True)
    assert page.js("document.documentElement.scrollWidth") <= 390
    page.wait("document.querySelector('#chart-0 svg').clientWidth <= 390")
    page.prefer("dark")
    assert page.js("getComputedStyle(document.body).backgroundColor") == "rgb(22, 23, 25)"
    page.pdf(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").stat().st_size > 20_000
