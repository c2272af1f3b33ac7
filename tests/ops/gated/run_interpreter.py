"""Claims about the kernels, each checked by Triton's interpreter (see `interpreter.py`)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from tests.ops.gated.cases import (
    INTERPRETER_CASES,
    GatedCase,
    make_inputs,
    outputs_and_gradients,
    relative_errors,
)
from tests.ops.interpreter import check_claim, kernels_everywhere
from vort.memories import GatedLinearMemory, GatedScalesMemory, MemoryInputs
from vort.ops.asked import Asked, pick
from vort.ops.gated import GatedInputs, gated_of_asked, gated_of_asked_exact


def equals_exact() -> None:
    for seed, case in enumerate(INTERPRETER_CASES):
        errors = relative_errors(case, torch.float32, "cpu", seed)
        # of strong decays' gradients most cancels
        bound = 2e-5 if case.strength else 1e-6
        assert all(error <= bound for error in errors.values()), (case.name, errors)


def equals_exact_in_bfloat16() -> None:
    # what a kernel does with a type does not depend on all that cases differ in
    with _bfloat16_as_on_a_gpu():
        for seed, case in enumerate(INTERPRETER_CASES[::2]):
            errors = relative_errors(case, torch.bfloat16, "cpu", seed)
            assert all(error <= 5e-3 for error in errors.values()), (case.name, errors)


def gates_that_forget_at_once_stay_finite() -> None:
    case = GatedCase(length=70, heads=1, strength=1e5)
    found = outputs_and_gradients(case, *make_inputs(case, torch.float32, "cpu", 0), wide=False)
    assert all(x.isfinite().all() for x in found.values())
    assert found["dbias"].abs().max() < 1e-5


def memories_read_at_places_what_they_read_everywhere() -> None:
    options: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 2, "head_dim": 16}
    scales = {"num_scales": 3, "horizon": 200}
    for memory in (
        GatedLinearMemory(**options, num_key_value_heads=1),
        GatedScalesMemory(**options, **scales, normalizer="none", feature_map="hedgehog"),
        GatedScalesMemory(**options, **scales, write_gate=False, read_weights=False),
    ):
        _compare(memory)


def second_derivatives_are_those_of_the_definition() -> None:
    case = GatedCase(batch=1, length=20, heads=1, states=2, features=4, values=3, asked=3)
    leaves, places, _ = make_inputs(case, torch.float32, "cpu", 0)
    given = [x.requires_grad_() for x in leaves.values()]
    found = []
    for function in (gated_of_asked, gated_of_asked_exact):
        o = function(GatedInputs(*given, places, 16.0, True, True))
        grads = torch.autograd.grad(o.square().sum(), given, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in grads), given))
    _check_close(*found)


def _compare(memory: Any) -> None:
    """Outputs and gradients of a memory that is told what is asked for, and of one that is not."""
    torch.manual_seed(0)
    heads = memory.num_key_value_heads
    hidden = torch.randn(2, 90, 32)
    q, k, v = (torch.randn(2, 90, n, 16) for n in (2, heads, heads))
    leaves = [x.requires_grad_() for x in (hidden, q, k, v)]
    asked = Asked(torch.tensor([130, 7, 89, 90, 8]), 2, 90)
    back = torch.randn(asked.rows, 2, 16)
    found = []
    for places in (None, asked):
        with kernels_everywhere(True):
            output = memory(MemoryInputs(*leaves, asked=places)).output
            assert output.ndim == (4 if places is None else 3)
            rows = output if output.ndim == 3 else pick(output, asked)
            wanted = [*leaves, *memory.parameters()]
            grads = torch.autograd.grad(rows, wanted, back)
        found.append([rows, *grads])
    _check_close(*found)


def _check_close(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for x, truth in zip(found, wanted, strict=True):
        scale = truth.abs().max().item()
        torch.testing.assert_close(x, truth, atol=1e-5 * scale, rtol=1e-5)


@contextmanager
def _bfloat16_as_on_a_gpu() -> Iterator[None]:
    """The interpreter cuts numbers off to bfloat16, and multiplies such by their bits.

    Here they are rounded, and multiplied by what they are.
    """
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    cut_off, multiply = interpreter_builder.create_fp_trunc, interpreter_builder.create_dot

    def rounded(x: Any, kind: Any) -> Any:
        if kind.scalar != tl.bfloat16:
            return cut_off(x, kind)
        bits = np.ascontiguousarray(x.data, np.float32).view(np.uint32)
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return TensorHandle(bits.astype(np.uint16), tl.bfloat16)

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def product(x: Any, y: Any, *rest: Any) -> Any:
        return multiply(widened(x), widened(y), *rest)

    with (
        mock.patch.object(interpreter_builder, "create_fp_trunc", rounded),
        mock.patch.object(interpreter_builder, "create_dot", product),
    ):
        yield


if __name__ == "__main__":
    check_claim()
