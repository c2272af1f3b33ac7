"""The state alone is the one that `retention` ends with."""

import pytest
import torch

from vort.ops.retention import retention
from vort.ops.retention.final import final_state


@pytest.mark.parametrize("normalizer", ["decayed", "undecayed", "none"])
@pytest.mark.parametrize("length", [1, 77])
@pytest.mark.parametrize("own_rates", [True, False])
def test_final_state_and_its_gradients_are_those_of_retention(
    normalizer: str, length: int, own_rates: bool
) -> None:
    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(shape, dtype=torch.float64, requires_grad=True)

    k, v, write = draw(2, length, 3, 4), draw(2, length, 3, 5), draw(2, length, 3, 6)
    rate = draw(3, 6) if own_rates else draw(6)
    given = (k, v, write, rate)

    def total(state: object) -> torch.Tensor:
        return sum((x.sin().sum() for x in state if x is not None), torch.zeros(()))  # type: ignore[attr-defined]

    _, expected = retention(
        k.detach(),
        k,
        v,
        write,
        -rate,
        normalizer=normalizer,  # type: ignore[arg-type]
        output_final_state=True,
        backend="exact",
    )
    found = final_state(k, v, write, -rate, normalizer=normalizer)
    assert expected is not None
    assert torch.allclose(found.G, expected.G, atol=1e-12)
    if expected.b is None:
        assert found.b is None
    else:
        assert torch.allclose(found.b, expected.b, atol=1e-12)
    ours = torch.autograd.grad(total(found), given, allow_unused=True)
    theirs = torch.autograd.grad(total(expected), given, allow_unused=True)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-10)


def test_keys_in_half_precision_leave_a_state_in_single() -> None:
    k, v = torch.rand(2, 1, 50, 2, 8).bfloat16()
    state = final_state(k, v, torch.rand(1, 50, 2, 4), -torch.rand(4))
    assert state.G.dtype == torch.float32
    assert state.b is not None
    assert state.b.dtype == torch.float32
