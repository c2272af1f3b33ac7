"""A layer as one differentiable function, in Triton's interpreter."""

import pytest

from tests.ops.interpreter import check_in_interpreter, claims_of, needs_triton


@needs_triton
@pytest.mark.parametrize("claim", claims_of("mixing"))
def test_kernels_in_the_interpreter(claim: str) -> None:
    check_in_interpreter("mixing", claim)
