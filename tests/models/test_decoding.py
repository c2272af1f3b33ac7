"""A recorded step of decoding, on a GPU: equal to the model without it."""

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_recorded_steps_and_fused_training_equal_the_model_without_them() -> None:
    from tests.models.decoding_cases import all_differences

    found = all_differences()
    assert all(error <= bound for error, bound in found.values()), found
