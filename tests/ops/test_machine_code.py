"""What is looked for in machine code is found there, and our kernels are free of it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.interpreter import needs_triton
from tests.ops.machine_code import Code, misread, unfenced, unwritten

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
        # one of two arguments, chosen by a place of 32 bits
        (["USEL UR4, URZ, 0x48, !UP0", "ULDC.64 UR4, c[0x0][UR4+0x210]", "UMOV UR6, UR5"], 0),
        (["ULDC.64 UR4, c[0x0][UR4+0x210]"], 1),
        (["UMOV UR10, URZ", "UMOV UR11, URZ", "HGMMA.64x64x16.F32.BF16 R8, R4, gdesc[UR8], R8"], 0),
        (["UMOV UR10, URZ", "UMOV UR11, URZ", "HGMMA.64x64x16.F32.BF16 R8, gdesc[UR8], R8"], 1),
        (["ULOP3.LUT UP0, UR23, UR6, 0x3, URZ, 0xc0, !UPT"], 1),  # UR23 is written, UR6 read
    ],
)
def test_a_uniform_register_is_written_before_it_is_read(code: list[str], faults: int) -> None:
    listing = "\n".join(f"        /*{16 * i:04x}*/   {text} ;" for i, text in enumerate(code))
    assert len(unwritten(listing)) == faults


WRITTEN_WITH = "or.b64 %rd1, %rd2, 4611686293305294848;"  # 0x40000040 in its upper half


@pytest.mark.parametrize(
    ("code", "faults"),
    [
        (["UMOV UR7, 0x40000040", "HGMMA.64x64x16.F32.BF16 R8, R4, gdesc[UR4], R8"], 0),
        (["UMOV UR7, 0xc0000010", "HGMMA.64x64x16.F32.BF16 R8, R4, gdesc[UR4], R8"], 1),
        # the descriptor of the first factor counts only where it is read from shared memory
        (["UMOV UR5, URZ", "HGMMA.64x64x16.F32.BF16 R8, R4, gdesc[UR4], R8"], 0),
        (["UMOV UR5, URZ", "HGMMA.64x64x16.F32.BF16 R8, gdesc[UR4], R8"], 1),
        # a step further, from a half that is still zero and from one that is not
        (
            [
                "UMOV UR3, URZ",
                "UIADD3.X UR3, UR3, 0x40000040, URZ, UP0, !UPT",
                "UMOV UR2, UR9",
                "UIADD3.64 UR6, UR2, 0x20, URZ",
                "HGMMA.64x64x16.F32.BF16 R8, R4, gdesc[UR4], R8",
            ],
            0,
        ),
        (
            [
                "UMOV UR3, 0x40000040",
                "UIADD3.X UR7, UR3, 0x40000040, URZ, UP0, !UPT",
                "HGMMA.64x64x16.F32.BF16 R8, R4, gdesc[UR4], R8",
            ],
            1,
        ),
        (["R2UR UR7, R3", "HGMMA.64x64x16.F32.BF16 R8, R4, gdesc[UR4], R8"], 0),  # not followed
    ],
)
def test_products_read_by_descriptors_the_kernel_has(code: list[str], faults: int) -> None:
    listing = "\n".join(f"        /*{16 * i:04x}*/   {text} ;" for i, text in enumerate(code))
    assert len(misread(WRITTEN_WITH, listing)) == faults


def test_a_product_that_is_waited_for_in_parts_is_noticed() -> None:
    step, last = "HGMMA.64x64x16.F32.BF16 R8, R4, gdesc[UR4], R8 ;", "gsb0 ;"
    whole = f"{step}\n{step[:-1]}, {last}"
    apart = f"{step[:-1]}, {last}\nWARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n{step[:-1]}, {last}"
    commit = "wgmma.commit_group.sync.aligned;"
    assert not Code(commit, whole).taken_apart()
    assert Code(commit, apart).taken_apart()


@needs_triton
def test_kernels_of_unequal_heads_compile_without_fault() -> None:
    """The shape that ptxas 12.8 once got wrong."""
    import torch

    from tests.ops.machine_code import compiled, recorded
    from tests.ops.retention.fused import Case, relative_errors

    sizes = {"length": 65, "key_dim": 64, "value_dim": 32, "num_scales": 1, "chunk_size": 64}
    case = Case(**sizes, heads=1, normalizer="none")
    with recorded() as found:
        relative_errors(case, torch.bfloat16, "cpu", 0)
    kernels = {launch.kernel: compiled(launch) for launch in found}
    with_products = {"state_kernel", "output_kernel", "query_kernel", "key_kernel"}
    assert set(kernels) == with_products | {"weights_kernel"}
    for name, code in kernels.items():
        assert ("HGMMA" in code.sass) == (name in with_products), name
        assert code.faults() == [], name
        assert not code.taken_apart(), name


@needs_triton
@pytest.mark.parametrize("length", [512, 300])
def test_queries_that_meet_half_blocks_compile_without_fault(length: int) -> None:
    """With full spans alone and with others, in the registers that let three programs run."""
    import torch

    from tests.ops.machine_code import compiled, recorded
    from tests.ops.retention.fused import Case, relative_errors

    case = Case(length=length, key_dim=64, value_dim=64, num_scales=8, heads=1, rates=False)
    with recorded() as found:
        relative_errors(case, torch.bfloat16, "cpu", 0)
    launch = next(launch for launch in found if launch.kernel == "lean_query_kernel")
    assert launch.tile.registers == 168
    code = compiled(launch)
    assert code.faults() == []
    assert not code.taken_apart()


@pytest.mark.slow
@needs_triton
def test_every_kernel_of_the_gpu_cases_compiles_without_fault() -> None:
    script = Path(__file__).with_name("check_compiled.py")
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
