"""Check part of the interpreter cases, with TRITON_INTERPRET=1: `... run_interpreter PART PARTS`.

A process of its own, because Triton decides whether to interpret when it is imported, for all
kernels of the process.

An error is allowed to 2e-6, or to twice what the same equation loses step by step in float32 on the
same draw: where a normaliser takes out nearly all of dq (a token that sees one other: all of it),
digits go in any float32, and how many depends on the machine's order of summation.
"""

import sys

import torch

from tests.ops.interpreter import poison_memory
from tests.ops.retention.fused import (
    INTERPRETER_CASES,
    STEP_CASES,
    added_elsewhere,
    compiled_difference,
    errors_in_few_parts,
    errors_of_lean_queries,
    fast_decay_error,
    relative_errors,
    rounding_errors,
    slow_decay_error,
    step_errors,
    wrongly_left_out,
)

BOUND = 2e-6


def main(part: int, parts: int) -> None:
    poison_memory()
    found: dict[str, dict[str, float]] = {}
    allowed: dict[str, dict[str, float]] = {}
    for seed, case in enumerate(INTERPRETER_CASES):
        if seed % parts == part:
            errors = found[case.name] = relative_errors(case, torch.float32, "cpu", seed)
            if not max(errors.values()) <= BOUND:
                plain = rounding_errors(case, seed)
                allowed[case.name] = {name: max(BOUND, 2 * x) for name, x in plain.items()}
    if part == 0:
        found["few parts"] = errors_in_few_parts("cpu")
        found["lean queries"] = errors_of_lean_queries("cpu")
    if part == parts - 1:
        for case in STEP_CASES:
            found[f"step {case.name}"] = step_errors(case, torch.float32, "cpu", 0)
        # rounding states to float32 leaves a few thousandths: half a percent is the bound
        found["slow decay"] = {"lost": slow_decay_error("cpu") / 5e-3 * BOUND}
        found["fast decay"] = {"left": fast_decay_error("cpu")}
        found["rows wrongly left out"] = wrongly_left_out("cpu")
        found["gradients where nobody asks"] = added_elsewhere("cpu")
        found["torch.compile"] = {"gradient": compiled_difference("cpu")}
    failed = {
        f"{case}: {name}": error
        for case, errors in found.items()
        for name, error in errors.items()
        if not error <= allowed.get(case, {}).get(name, BOUND)
    }
    for name, error in failed.items():
        print(f"{name} off by {error:.1e}")
    print(f"{len(found)} cases, {len(failed)} failures")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
