"""The decode step against the exact form, token by token."""

import torch
from torch import Tensor

from tests.ops.retention_triton.cases import Case, make_inputs
from vort.ops.retention.exact import retention_exact
from vort.ops.retention.state import RetentionState


def step_errors(case: Case, dtype: torch.dtype, device: str, seed: int) -> dict[str, float]:
    """Relative errors of outputs and final state after `case.length` single steps."""
    from vort.ops.retention.triton import retention_step_triton

    inputs = make_inputs(case, dtype, device, seed)
    read = inputs.get("read")
    b = inputs.get("b")
    state = RetentionState(inputs["G"].clone(), None if b is None else b.clone())
    options = {"normalizer": case.normalizer, "include_self": case.include_self}
    rows = [
        retention_step_triton(
            state,
            *(inputs[name][:, t] for name in ("q", "k", "v", "write")),
            inputs["log_decay"],
            read=None if read is None else read[:, t],
            **options,
        )
        for t in range(case.length)
    ]
    wide: dict[str, Tensor] = {name: x.double() for name, x in inputs.items()}
    o, last = retention_exact(
        wide["q"], wide["k"], wide["v"], wide["write"], wide["log_decay"],
        read=wide.get("read"), initial_state=RetentionState(wide["G"], wide.get("b")),
        output_final_state=True, **options,
    )  # fmt: skip
    assert last is not None
    pairs = {"o": (torch.stack(rows, 1), o), "G": (state.G, last.G)}
    if last.b is not None and state.b is not None:
        pairs["b"] = (state.b, last.b)
    return {
        name: ((x.double() - truth).norm() / truth.norm()).item()
        for name, (x, truth) in pairs.items()
    }


STEP_CASES = [
    Case(batch=2, length=5, key_dim=16, value_dim=20, per_head=True),
    Case(batch=1, length=4, normalizer="undecayed", include_self=False),
    Case(batch=1, length=3, normalizer="none", read=False),
    Case(batch=3, length=3, key_dim=80, value_dim=80, terms=5, include_self=False),
]
