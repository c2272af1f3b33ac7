"""What every test runs under: fixed seeds, NaN in uninitialised memory, one thread a worker."""

import os
from typing import Any, BinaryIO

import pytest
import torch
from hypothesis import HealthCheck, settings

# hypothesis examples build tensors and run kernels; a deadline would measure the machine.
settings.register_profile(
    "vort",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("vort")

# In deterministic mode torch.empty comes back filled with NaN: a missed write shows.
torch.use_deterministic_algorithms(True, warn_only=True)
torch.utils.deterministic.fill_uninitialized_memory = True

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    # So do the processes that tests start: threads that outnumber cores wait for each other busily.
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no GPU."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are drawn, and files have nothing in them: to render one takes a second."""

    def save(drawing: Any, file: BinaryIO, *, format: str, **options: Any) -> None:
        file.write(b"<svg/>" if format == "svg" else b"\x89PNG\r\n\x1a\n")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", save)


@pytest.fixture(params=["numpy", "torch"])
def road(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both roads of `vort.ops.products`, whatever the machine would take."""
    monkeypatch.setattr("vort.ops.products.ONE_BY_ONE", request.param == "numpy")
    return str(request.param)


@pytest.fixture
def torch_road(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own products alone, by which few positions have the bits of all."""
    monkeypatch.setattr("vort.ops.products.ONE_BY_ONE", False)
