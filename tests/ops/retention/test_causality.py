"""What happens at t cannot be seen before t, to the last bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.retention.cases import Case, cases, small_pieces


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("backend", ["exact", "recurrent", "chunk"])
@settings(max_examples=20)
@given(case=cases(max_length=70, max_scales=8), where=st.floats(0, 1))
def test_the_past_is_bit_identical(
    backend: str, dtype: torch.dtype, case: Case, where: float
) -> None:
    inputs = {name: x.detach() for name, x in case.inputs(dtype).items()}
    length = inputs["q"].shape[1]
    t = min(int(where * length), max(length - 1, 0))
    changed = dict(inputs)
    for name in ("q", "k", "v", "write", "read"):
        if name in inputs:
            changed[name] = inputs[name].clone()
            changed[name][:, t:] = 100 * torch.rand_like(inputs[name][:, t:])
    with small_pieces(2000):
        before = case.run(backend, inputs)["o"]
        after = case.run(backend, changed)["o"]
    assert torch.equal(before[:, :t], after[:, :t])


@pytest.mark.parametrize("backend", ["exact", "recurrent", "chunk"])
def test_without_self_a_token_does_not_see_its_own_write(backend: str) -> None:
    case = Case(length=40, include_self=False)
    inputs = {name: x.detach() for name, x in case.inputs().items()}
    changed = {**inputs, "v": inputs["v"].clone()}
    changed["v"][:, 20] += 1
    before, after = (case.run(backend, given)["o"] for given in (inputs, changed))
    assert torch.equal(before[:, :21], after[:, :21])
    assert not torch.equal(before[:, 21], after[:, 21])
