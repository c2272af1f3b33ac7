"""Claims about the kernels, each checked by Triton's interpreter (see `interpreter.py`)."""

import importlib
from itertools import product
from unittest import mock

import torch

from tests.ops.interpreter import check_claim
from tests.ops.local_attention.fused import (
    INTERPRETER_CASES,
    WALKED_CASES,
    LocalCase,
    changed_past,
    compiled_difference,
    make_inputs,
    relative_errors,
)
from vort.ops.local_attention import apply_rope

BOUND = 2e-6


def equals_exact() -> None:
    for seed, case in enumerate(INTERPRETER_CASES):
        errors = relative_errors(case, torch.float32, "cpu", seed)
        assert all(error <= BOUND for error in errors.values()), (case.name, errors)


def all_gradients_in_one_walk_equal_exact() -> None:
    attention = importlib.import_module("vort.ops.local_attention.triton.attention")
    in_float32 = mock.patch.dict(attention.WALKS, {torch.float32: attention.Tile(32, 4, 1)})
    launched = mock.Mock(wraps=attention.launch)
    with in_float32, mock.patch.object(attention, "launch", launched):
        for seed, (case, run) in enumerate(product(WALKED_CASES, (1, 3, 100))):
            launched.reset_mock()
            with mock.patch.object(attention, "choose_run", lambda *_, run=run: run):
                errors = relative_errors(case, torch.float32, "cpu", seed)
            assert launched.call_args.args[0] is attention.attended_walk_kernel, case.name
            assert all(error <= BOUND for error in errors.values()), (case.name, run, errors)


def is_causal_to_the_bit() -> None:
    assert changed_past("cpu", torch.float32) == 0


def compiles_into_one_graph() -> None:
    assert compiled_difference("cpu") <= BOUND


def obeys_torch_library() -> None:
    importlib.import_module("vort.ops.local_attention.triton")
    inputs = make_inputs(LocalCase(length=20), torch.float32, "cpu", 0)
    q, k, v = (inputs[name].requires_grad_() for name in "qkv")
    for with_entropy in (True, False):
        arguments = (q, k, v, None, None, 7, 0.3, with_entropy)
        torch.library.opcheck(torch.ops.vort.local_attention_fused.default, arguments)
    torch.library.opcheck(torch.ops.vort.rotate.default, (q, torch.arange(20), 100.0, False))


def rotates_as_pytorch_does() -> None:
    from vort.ops.local_attention.triton import rotate

    x = torch.randn(2, 37, 3, 10)
    for positions in (torch.arange(37) + 5, torch.arange(74).view(2, 37) ** 4):
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        turned = rotate(leaves[0], positions, 100.0)
        wanted = apply_rope(leaves[1], positions, 100.0)
        torch.testing.assert_close(turned, wanted)
        torch.testing.assert_close(rotate(turned, positions, 100.0, back=True), x)
        pairs = ((turned, leaves[0]), (wanted, leaves[1]))
        grads = [torch.autograd.grad((y * y[:1]).sum(), leaf)[0] for y, leaf in pairs]
        torch.testing.assert_close(*grads)


if __name__ == "__main__":
    check_claim()
