"""Many scales in groups: the same sums as in one call."""

from functools import partial

import pytest
import torch

from vort.ops.retention.chunk import retention_chunk
from vort.ops.retention.groups import retention_in_groups
from vort.ops.retention.inputs import Inputs


def _draw(scales: int, heads_decay: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    wide = {"dtype": torch.float64}
    shape = (2, 37, 2)
    decay_shape = (2, scales) if heads_decay else (scales,)
    return {
        "q": torch.rand(*shape, 5, **wide),
        "k": torch.rand(*shape, 5, **wide),
        "v": torch.randn(*shape, 6, **wide),
        "write": torch.rand(*shape, scales, **wide),
        "log_decay": -torch.rand(*decay_shape, **wide),
        "read": torch.rand(*shape, scales, **wide),
    }


@pytest.mark.parametrize("normalizer", ["decayed", "undecayed", "none"])
@pytest.mark.parametrize("with_read", [True, False])
@pytest.mark.parametrize("heads_decay", [True, False])
def test_groups_equal_one_call_with_states_and_gradients(
    normalizer: str, with_read: bool, heads_decay: bool
) -> None:
    given = _draw(11, heads_decay)
    if not with_read:
        given.pop("read")

    def run(grouped: bool) -> list[torch.Tensor]:
        leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
        inputs = Inputs(**leaves, normalizer=normalizer, output_final_state=True)
        call = partial(retention_in_groups, retention_chunk, 4) if grouped else retention_chunk
        first, state = call(inputs)
        second, end = call(inputs._replace(G=state.G, b=state.b))
        (first.square().sum() + second.square().sum()).backward()
        tails = [end.G] if end.b is None else [end.G, end.b]
        return [first, second, *tails, *(x.grad for x in leaves.values())]

    for one, groups in zip(run(False), run(True), strict=True):
        torch.testing.assert_close(groups, one, rtol=1e-9, atol=1e-9)
