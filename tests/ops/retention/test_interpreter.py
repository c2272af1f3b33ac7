"""The GPU kernels, run by Triton's interpreter on the CPU, against the exact form in float64."""

from typing import Any

import pytest
import torch

from tests.ops.interpreter import check_in_interpreter, imports, needs_triton

PARTS = 3


@needs_triton
@pytest.mark.parametrize("part", range(PARTS))
def test_every_output_and_gradient_equals_exact_in_the_interpreter(part: int) -> None:
    check_in_interpreter("retention", str(part), str(PARTS))


@needs_triton
@pytest.mark.parametrize(
    ("changes", "pay"),
    [
        ({}, True),
        ({"readers": 0}, True),
        ({"readers": 144}, True),
        ({"readers": 145}, False),
        ({"readers": 64, "scales": 1}, True),
        ({"readers": 72, "scales": 1}, False),
        ({"keys": 65}, False),
        ({"values": 65}, False),
        ({"asked": None}, False),
        ({"output_final_state": True}, False),
        ({"G": torch.empty(0)}, False),
        ({"cu_seqlens": torch.empty(0)}, False),
        ({"normalizer": "none"}, True),
        ({"scales": 136}, True),
        ({"scales": 300}, False),
    ],
)
def test_pairs_pay_where_only_few_outputs_of_narrow_heads_are_wanted(
    changes: dict[str, Any], pay: bool
) -> None:
    from vort.ops.retention.inputs import Inputs
    from vort.ops.retention.triton.pairs import pairs_pay

    sizes = {"readers": 64, "scales": 12, "keys": 64, "values": 64}
    sizes |= {name: x for name, x in changes.items() if name in sizes}

    def tensor(size: int) -> torch.Tensor:
        return torch.empty(4, 1000, 2, size, device="meta")

    q, v, write = tensor(sizes["keys"]), tensor(sizes["values"]), tensor(sizes["scales"])
    asked = torch.empty(4 * sizes["readers"], dtype=torch.int64, device="meta")
    inputs = Inputs(q, q, v, write, write[0, 0, 0], asked=asked)
    others = {name: x for name, x in changes.items() if name not in sizes}
    assert pairs_pay(inputs._replace(**others)) is pay


def test_importing_vort_does_not_import_triton() -> None:
    assert not imports("vort.ops.retention.triton", "import vort.ops.retention")
