"""Gated linear attention at a few places: the definition, the kernels, and when they are chosen."""

import pytest
import torch

from tests.ops.gated.cases import LEAVES, POWER, GatedCase, exact, make_inputs
from tests.ops.interpreter import check_in_interpreter, claims_of, imports, needs_triton
from vort.memories import GatedScalesMemory, MemoryInputs
from vort.ops.asked import Asked
from vort.ops.gated import GatedInputs, gated_of_asked_exact, walk_pays


@needs_triton
@pytest.mark.parametrize("claim", claims_of("gated"))
def test_a_walk_in_the_interpreter(claim: str) -> None:
    check_in_interpreter("gated", claim)


@pytest.mark.parametrize("asked", [5, "ends", "one row", "twice", "none"])
def test_the_form_in_pytorch_is_gated_linear_attention(asked: int | str) -> None:
    case = GatedCase(length=40, asked=asked, ones=asked == 5)
    leaves, places, back = make_inputs(case, torch.float32, "cpu", 0)
    wide = {name: x.double().requires_grad_() for name, x in leaves.items()}
    given = GatedInputs(*(wide[name] for name in LEAVES), places, POWER, case.ones, True)
    found, wanted = gated_of_asked_exact(given), exact(wide, places, case.ones)
    torch.testing.assert_close(found, wanted)
    ours, theirs = (
        torch.autograd.grad(o, [*wide.values()], back.double()) for o in (found, wanted)
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("count", "sizes", "pays"),
    [
        (64, (64, 64, 16), True),
        (1250, (64, 64, 16), True),
        (1251, (64, 64, 16), False),
        (64, (128, 128, 64), True),
        (64, (160, 64, 16), False),
        (64, (64, 129, 16), False),
        (64, (64, 64, 65), False),
    ],
)
def test_a_walk_pays_for_few_places_and_sizes_that_fit(
    count: int, sizes: tuple[int, int, int], pays: bool
) -> None:
    assert walk_pays(Asked(torch.arange(count), 2, 5000), *sizes) is pays


def test_on_a_cpu_all_positions_are_read_and_no_kernel_is_imported() -> None:
    memory = GatedScalesMemory(hidden_size=16, num_attention_heads=2, num_scales=3)
    q, k, v = torch.randn(3, 1, 20, 2, 8)
    asked = Asked(torch.tensor([3]), 1, 20)
    output = memory(MemoryInputs(torch.randn(1, 20, 16), q, k, v, asked=asked)).output
    assert output.shape == (1, 20, 2, 8)
    assert not imports("triton", "import vort.memories.gla, vort.ops.gated")
