"""The GPU kernels, run by Triton's interpreter on the CPU, against the exact form in float64."""

import pytest

from tests.ops.interpreter import check_in_interpreter, imports, needs_triton

PARTS = 3


@needs_triton
@pytest.mark.parametrize("part", range(PARTS))
def test_every_output_and_gradient_equals_exact_in_the_interpreter(part: int) -> None:
    check_in_interpreter("retention", str(part), str(PARTS))


def test_importing_vort_does_not_import_triton() -> None:
    assert not imports("vort.ops.retention.triton", "import vort.ops.retention")
