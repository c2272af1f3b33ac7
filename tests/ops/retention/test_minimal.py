"""The form to paste computes the definition: outputs, final states and all gradients."""

import torch
from hypothesis import example, given, settings

from tests.ops.retention.cases import Case, assert_agrees, cases, variant
from vort.ops.retention import retention_minimal


def minimal(case: Case, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Output and final state by name, as `Case.run` gives them."""
    given = dict(inputs)
    G, b = given.pop("G", None), given.pop("b", None)
    output, (G, b) = retention_minimal(
        **given,
        normalizer=case.normalizer,
        include_self=case.include_self,
        initial_state=None if G is None else (G, b),
        chunk_size=case.chunk_size,
        eps=case.eps,
    )
    named = {"o": output, "final G": G, "final b": b}
    return {name: x for name, x in named.items() if x is not None}


@settings(max_examples=60)
@given(case=cases())
@example(case=Case(length=0))
@example(case=Case(length=1, keys=1, values=1, num_scales=1))
@example(case=Case(length=83, normalizer="undecayed", include_self=False))
@example(case=Case(length=64, normalizer="none", state=False, read=False))
@example(case=Case(decays=(200.0,), length=50))
def test_minimal_equals_exact_in_float64(case: Case) -> None:
    assert_agrees(variant(case, lengths=None), minimal)
