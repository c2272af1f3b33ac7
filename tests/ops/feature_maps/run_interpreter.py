"""Claims about the kernels, each checked by Triton's interpreter (see `interpreter.py`)."""

import importlib

import torch

from tests.ops.feature_maps.cases import (
    HIGH,
    HIGH_AND_LONG,
    INTERPRETER_CASES,
    LONG,
    LONG_QUERIES,
    MapCase,
    bounds_reached,
    compiled_difference,
    make_inputs,
    relative_errors,
)
from tests.ops.interpreter import check_claim

# FAVOR+ raises e to sums as large as 80, of which float32 rounds off a few millionths
BOUNDS = {"hedgehog": 2e-6, "favor": 1e-5}


def equals_exact() -> None:
    for seed, case in enumerate(INTERPRETER_CASES):
        errors = relative_errors(case, torch.float32, "cpu", seed)
        assert all(e <= BOUNDS[case.kind] for e in errors.values()), (case.kind, case.name, errors)


def adds_up_the_blocks_of_a_program() -> None:
    from vort.ops.feature_maps.triton import hedgehog

    hedgehog.PROGRAMS = 6  # so few that a program walks over several blocks
    for case in (MapCase(leading=(300,)), MapCase(leading=(333,), dim=80, shared=True, heads=1)):
        errors = relative_errors(case, torch.float32, "cpu", 0)
        assert all(e <= BOUNDS["hedgehog"] for e in errors.values()), (case.name, errors)


def cases_reach_the_bounds() -> None:
    for case in (LONG, LONG_QUERIES, HIGH_AND_LONG):
        assert bounds_reached(case, INTERPRETER_CASES.index(case))[0] > 0.2, case.name
    assert bounds_reached(HIGH, INTERPRETER_CASES.index(HIGH))[1] > 0.005


def compiles_into_one_graph() -> None:
    assert compiled_difference("cpu") <= BOUNDS["hedgehog"]


def obeys_torch_library() -> None:
    importlib.import_module("vort.ops.feature_maps.triton")
    for shared in (True, False):
        inputs = make_inputs(MapCase(leading=(20,), shared=shared), torch.float32, "cpu", 0)
        x, weight = (inputs[name].requires_grad_() for name in ("x", "matrix"))
        torch.library.opcheck(torch.ops.vort.hedgehog_fused.default, (x, weight))
    inputs = make_inputs(MapCase("favor", leading=(20,)), torch.float32, "cpu", 0)
    for max_norm, shift in ((6.0, False), (None, True)):
        arguments = (inputs["x"].requires_grad_(), inputs["matrix"], max_norm, shift, 29.0)
        torch.library.opcheck(torch.ops.vort.favor_fused.default, arguments)


if __name__ == "__main__":
    check_claim()
