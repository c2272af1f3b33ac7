"""Kept or computed again, states give the backward the same gradients, to the bit."""

import pytest
import torch

from vort.ops.retention import retention
from vort.ops.retention.chunk import layout


@pytest.mark.parametrize("read", [True, False])
def test_gradients_are_the_same_from_states_that_are_kept_and_from_those_computed_again(
    read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    q, k, v = torch.rand(3, 2, 300, 2, 16).unbind()
    write, reads = torch.rand(2, 2, 300, 2, 4).unbind()
    log_decay = -torch.rand(2, 4)
    leaves = [x.requires_grad_() for x in (q, k, v, write, log_decay)]
    found = []
    # A few chunks in a piece, so that there is something inside of it.
    monkeypatch.setattr(layout, "WORKSPACE", {"cpu": 1 << 17, "cuda": 1 << 17})
    for few in (1 << 22, 0):
        monkeypatch.setattr(layout, "FEW_STATES", few)
        o, _ = retention(*leaves, read=reads if read else None, backend="chunk")
        # Twice: what was kept is not used up.
        once = torch.autograd.grad(o.square().sum(), leaves, retain_graph=True)
        again = torch.autograd.grad(o.square().sum(), leaves)
        assert all(map(torch.equal, once, again))
        found.append(once)
    assert all(map(torch.equal, *found))
