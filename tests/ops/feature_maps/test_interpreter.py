"""The GPU kernels, run by Triton's interpreter on the CPU, against PyTorch in float64."""

import pytest

from tests.ops.interpreter import check_in_interpreter, claims_of, imports, needs_triton


@needs_triton
@pytest.mark.parametrize("claim", claims_of("feature_maps"))
def test_fused_feature_maps_in_the_interpreter(claim: str) -> None:
    check_in_interpreter("feature_maps", claim)


@pytest.mark.parametrize("name", ["hedgehog", "favor"])
def test_feature_maps_on_a_cpu_do_not_import_the_kernels(name: str) -> None:
    code = (
        "import torch; from vort.ops import feature_map; "
        f"phi = feature_map({name!r}, 4); phi(torch.zeros(1, 3, 1, 4)); "
    )
    assert not imports("vort.ops.feature_maps.triton", code)
