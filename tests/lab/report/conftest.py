"""One Chromium for a worker's tests; they are skipped, with the reason, where there is none."""

from collections.abc import Iterator

import pytest

from tests.lab.report.browser import Browser, find_chromium


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    binary = find_chromium()
    if binary is None:
        pytest.skip("no Chromium found: install Debian's chromium, or set VORT_CHROMIUM")
    running = Browser(binary)
    yield running
    running.close()
