"""What is looked for in machine code is found there, and our kernels are free of it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.interpreter import needs_triton
from tests.ops.machine_code import unfenced, unwritten

WAIT, FENCE = "cp.async.wait_group 1;", "fence.proxy.async.shared::cta;"
LOAD, PRODUCT = "cp.async.cg.shared.global [a], [b], 16;", "wgmma.mma_async.x;"
LOOP, AGAIN = "$L__BB0_3: // loop", "@%p9 bra $L__BB0_3;"


def test_a_product_after_a_wait_for_pipelined_loads_needs_a_fence() -> None:
    assert unfenced("\n".join([LOOP, WAIT, "bar.sync 0;", PRODUCT, LOAD, AGAIN])) != []
    assert unfenced("\n".join([LOOP, WAIT, FENCE, PRODUCT, PRODUCT, LOAD, AGAIN])) == []
    assert unfenced("\n".join([LOOP, WAIT, FENCE, PRODUCT, LOAD, AGAIN, WAIT, PRODUCT])) == []


@pytest.mark.parametrize(
    ("code", "faults"),
    [
        (["ULDC UR4, c[0x0][0x208]", "UIADD3 UR6, UR4, 0x10, URZ"], 0),
        (["ULDC UR4, c[0x0][0x208]", "UIADD3 UR6, UR5, 0x10, URZ"], 1),
        (["UMOV UR4, URZ", "UMOV UR5, URZ", "UIADD3.64 UR6, UR4, 0x2, URZ", "UMOV UR8, UR7"], 0),
        (["UMOV UR4, URZ", "UIADD3.64 UR6, UR4, 0x2, URZ"], 1),  # a pair, half of it written
        (["ULDC.64 UR4, c[0x0][0x208]", "@!P0 LDG.E R3, desc[UR4][R2.64]"], 0),
        (["@P1 LDG.E R3, desc[UR4][R2.64]"], 1),
        (["UMOV UR10, URZ", "UMOV UR11, URZ", "HGMMA.64x64x16.F32.BF16 R8, R4, gdesc[UR8], R8"], 0),
        (["UMOV UR10, URZ", "UMOV UR11, URZ", "HGMMA.64x64x16.F32.BF16 R8, gdesc[UR8], R8"], 1),
        (["ULOP3.LUT UP0, UR23, UR6, 0x3, URZ, 0xc0, !UPT"], 1),  # UR23 is written, UR6 read
    ],
)
def test_a_uniform_register_is_written_before_it_is_read(code: list[str], faults: int) -> None:
    listing = "\n".join(f"        /*{16 * i:04x}*/   {text} ;" for i, text in enumerate(code))
    assert len(unwritten(listing)) == faults


@needs_triton
def test_kernels_of_unequal_heads_compile_without_fault() -> None:
    """The shape that ptxas 12.8 once got wrong."""
    import torch

    from tests.ops.machine_code import compiled, recorded
    from tests.ops.retention_triton.cases import Case, relative_errors

    case = Case(length=65, key_dim=64, value_dim=32, terms=1, heads=1, normalizer="none", span=64)
    with recorded() as found:
        relative_errors(case, torch.bfloat16, "cpu", 0)
    kernels = {launch.kernel: compiled(launch) for launch in found}
    assert set(kernels) == {"state_kernel", "output_kernel", "query_kernel", "key_kernel"}
    for name, code in kernels.items():
        assert "HGMMA" in code.sass, name
        assert code.faults() == [], name


@pytest.mark.slow
@needs_triton
def test_every_kernel_of_the_gpu_cases_compiles_without_fault() -> None:
    script = Path(__file__).with_name("check_compiled.py")
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
