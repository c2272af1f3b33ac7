"""Claims about the kernels, for Triton's interpreter; see `tests.ops.interpreter`."""

import torch

from tests.ops.interpreter import check_claim
from tests.ops.linear.cases import CHECKS

BOUND = 2e-6


def every_output_and_gradient_equals_exact() -> None:
    for seed, (name, check) in enumerate(CHECKS.items()):
        errors = check(torch.float32, "cpu", seed)
        assert all(error <= BOUND for error in errors.values()), (name, errors)


def obeys_torch_library() -> None:
    from vort.ops.linear import triton

    both, weight = torch.randn(5, 12, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    inputs = triton.GatedInputs(both, weight)
    torch.library.opcheck(torch.ops.vort.gated_linear.default, tuple(inputs))


if __name__ == "__main__":
    check_claim()
