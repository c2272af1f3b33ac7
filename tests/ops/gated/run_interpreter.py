"""Claims about the kernels, each checked by Triton's interpreter (see `interpreter.py`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

from tests.ops.gated.cases import (
    INTERPRETER_CASES,
    GatedCase,
    make_inputs,
    outputs_and_gradients,
    relative_errors,
)
from tests.ops.interpreter import check_claim


def equals_exact() -> None:
    for seed, case in enumerate(INTERPRETER_CASES):
        errors = relative_errors(case, torch.float32, "cpu", seed)
        # of strong decays' gradients most cancels
        bound = 1e-4 if case.strength else 1e-6
        assert all(error <= bound for error in errors.values()), (case.name, errors)


def equals_exact_in_bfloat16() -> None:
    with _bfloat16_as_on_a_gpu():
        for seed, case in enumerate(INTERPRETER_CASES):
            errors = relative_errors(case, torch.bfloat16, "cpu", seed)
            print(case.name, errors)
            assert all(error <= 5e-3 for error in errors.values()), (case.name, errors)


def gates_that_forget_at_once_stay_finite() -> None:
    case = GatedCase(length=70, heads=1, strength=1e5)
    found = outputs_and_gradients(case, *make_inputs(case, torch.float32, "cpu", 0), wide=False)
    assert all(x.isfinite().all() for x in found.values())
    assert found["dbias"].abs().max() < 1e-5


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
