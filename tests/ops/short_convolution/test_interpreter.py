"""The GPU kernels, run by Triton's interpreter on the CPU, against the definition in float64."""

import pytest

from tests.ops.interpreter import check_in_interpreter, claims_of, needs_triton


@needs_triton
@pytest.mark.parametrize("claim", claims_of("short_convolution"))
def test_heads_in_the_interpreter(claim: str) -> None:
    check_in_interpreter("short_convolution", claim)
