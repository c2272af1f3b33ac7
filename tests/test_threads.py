"""NumPy's library keeps to one thread where matrices are small, and has the others back after."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from vort import threads
from vort.fractional import basis_fit
from vort.ops import products


class Library:
    """What would be asked of OpenBLAS."""

    def __init__(self) -> None:
        self.threads = 7
        self.seen: list[int] = []

    def set(self, number: int) -> None:
        self.threads = number


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(threads, "_thread_numbers", lambda: (lambda: made.threads, made.set))
    alone = threads.OneThread()
    for user in (products, basis_fit):
        monkeypatch.setattr(user, "one_thread", alone)
    monkeypatch.setattr(products, "ONE_BY_ONE", True)
    return made


def test_a_batch_is_one_threads_and_the_others_come_back(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    matmul = np.matmul

    def watched(*given: Any, **options: Any) -> Any:
        library.seen.append(library.threads)
        return matmul(*given, **options)

    monkeypatch.setattr(np, "matmul", watched)
    found = products.bmm(torch.ones(3, 8, 8), torch.ones(3, 8, 8))
    torch.testing.assert_close(found.unique().item(), 8.0)
    assert library.seen == [1]
    assert library.threads == 7


def test_a_basis_is_fitted_by_one_thread(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    solve = np.linalg.solve

    def watched(*given: Any) -> Any:
        library.seen.append(library.threads)
        return solve(*given)

    monkeypatch.setattr(np.linalg, "solve", watched)
    basis_fit.fit_rates_and_polynomials(100, 3, 0.05, draft=True)
    assert set(library.seen) == {1}
    assert library.threads == 7


def test_the_last_to_go_gives_the_threads_back_whatever_went_wrong(library: Library) -> None:
    both = threading.Barrier(2)

    def work() -> None:
        with products.one_thread:
            both.wait(30)
            assert library.threads == 1

    def fail() -> None:
        with products.one_thread:
            both.wait(30)
            raise RuntimeError

    with ThreadPoolExecutor(2) as pool:
        done = pool.submit(work), pool.submit(fail)
        done[0].result(60)
        with pytest.raises(RuntimeError):
            done[1].result(60)
    assert library.threads == 7


def test_the_library_of_numpy_is_found_where_it_is_openblas() -> None:
    configured = np.show_config(mode="dicts")
    assert isinstance(configured, dict)
    count, change = threads._thread_numbers()
    if "openblas" not in configured["Build Dependencies"]["blas"]["name"]:
        pytest.skip("NumPy has another library")
    before = count()
    try:
        change(1)
        assert count() == 1
    finally:
        change(before)
    assert count() == before
