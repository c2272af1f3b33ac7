"""What tests of experiments on books share."""

from pathlib import Path

import pytest

from tests.lab.experiments.tiny import books


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    return books(tmp_path / "books")
