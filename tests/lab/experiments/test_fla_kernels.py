import pytest


def test_kernels_loaded_for_a_baseline_try_few_configurations() -> None:
    triton = pytest.importorskip("triton")
    from vort.lab.experiments.fla_kernels import few_configurations

    def tuned(count: int) -> int:
        kernel = triton.jit(_nothing)
        configs = [triton.Config({}, num_warps=1 << n) for n in range(count)]
        return len(triton.autotune(configs, key=[])(kernel).configs)

    with few_configurations(3):
        assert [tuned(n) for n in (1, 3, 4, 10)] == [1, 3, 2, 3]
    assert tuned(10) == 10


def _nothing(x):  # type: ignore[no-untyped-def]
    pass
