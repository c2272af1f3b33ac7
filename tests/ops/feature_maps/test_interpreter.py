"""The GPU kernels, run by Triton's interpreter on the CPU, against PyTorch in float64."""

import pytest

from tests.ops.interpreter import check_in_interpreter, imports, needs_triton

CLAIMS = [
    "equals_exact",
    "adds_up_the_blocks_of_a_program",
    "cases_reach_the_bounds",
    "compiles_into_one_graph",
    "obeys_torch_library",
]


@needs_triton
@pytest.mark.parametrize("claim", CLAIMS)
def test_fused_feature_maps_in_the_interpreter(claim: str) -> None:
    check_in_interpreter("feature_maps", claim)


@pytest.mark.parametrize("name", ["hedgehog", "favor"])
def test_feature_maps_on_a_cpu_do_not_import_the_kernels(name: str) -> None:
    code = (
        "import torch; from vort.ops import feature_map; "
        f"phi = feature_map({name!r}, 4); phi(torch.zeros(1, 3, 1, 4)); "
    )
    assert not imports("vort.ops.feature_maps.triton", code)
