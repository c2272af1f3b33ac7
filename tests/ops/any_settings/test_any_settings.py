"""Blocks of settings drawn at random: what kernels compute is what PyTorch computes."""

import pytest

from tests.ops.interpreter import check_in_interpreter, needs_triton


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 120, 10))
def test_kernels_and_pytorch_agree(first: int) -> None:
    check_in_interpreter("any_settings", str(first), str(first + 10))
