"""Claims about the kernels, each checked by Triton's interpreter (see `interpreter.py`)."""

import torch

from tests.ops.interpreter import check_claim
from tests.ops.rms_norm.cases import (
    INTERPRETER_CASES,
    NormCase,
    compiled_difference,
    make_inputs,
    relative_errors,
)

BOUND = 1e-6


def equals_exact() -> None:
    for seed, case in enumerate(INTERPRETER_CASES):
        errors = relative_errors(case, torch.float32, "cpu", seed)
        assert all(error <= BOUND for error in errors.values()), (case.name, errors)


def programs_that_walk_several_blocks_equal_exact() -> None:
    from vort.ops.rms_norm import triton as op

    op.PROGRAMS = 3
    for case in (NormCase(shape=(333,)), NormCase(shape=(333,), eps=0.0)):
        errors = relative_errors(case, torch.float32, "cpu", 0)
        assert all(error <= BOUND for error in errors.values()), (case.name, errors)


def keeps_types_under_autocast() -> None:
    """bfloat16 with a float32 weight, as in training: gradients in the types of their inputs."""
    case = NormCase()
    plain = relative_errors(case, torch.bfloat16, "cpu", 0)
    with torch.autocast("cpu", torch.bfloat16):
        within = relative_errors(case, torch.bfloat16, "cpu", 0)
    assert plain == within
    assert all(error <= 4e-3 for error in plain.values()), plain


def compiles_into_one_graph() -> None:
    assert compiled_difference("cpu") <= BOUND


def obeys_torch_library() -> None:
    operator = torch.ops.vort.rms_norm_fused.default
    inputs = make_inputs(NormCase(shape=(2, 5), dim=20), torch.float32, "cpu", 0)
    x, weight = (inputs[name].requires_grad_() for name in ("x", "weight"))
    torch.library.opcheck(operator, (x, weight, 1e-6))
    torch.library.opcheck(operator, (x, None, 1e-6))
    strided = inputs["dy"][:, 1:].requires_grad_()
    torch.library.opcheck(operator, (strided, weight, 1e-6))


if __name__ == "__main__":
    check_claim()
