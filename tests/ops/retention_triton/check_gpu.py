"""GPU checks where there is no pytest: `python tests/ops/retention_triton/check_gpu.py`.

Cases run in several processes because compiling, not computing, takes the time. Prints one line a
case as it ends and exits 1 if any error is above its bound (1e-2 for bfloat16, 1e-4 for float32).

Under a memory checker: `compute-sanitizer --tool memcheck python .../check_gpu.py --small` (and
`--tool racecheck`): one small case of each dtype, in one process.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
for folder in (ROOT, ROOT / "src"):
    sys.path.insert(0, str(folder))

import torch  # noqa: E402

from tests.ops.retention_triton.cases import (  # noqa: E402
    GPU_CASES,
    Case,
    compiled_difference,
    relative_errors,
    small,
)
from tests.ops.retention_triton.steps import STEP_CASES, step_errors  # noqa: E402

BOUNDS = {torch.bfloat16: 1e-2, torch.float32: 1e-4}


def check_steps(job: tuple[Case, torch.dtype, int]) -> dict[str, object]:
    """The decode step on one case."""
    record: dict[str, object] = {"case": f"step {job[0].name}", "dtype": "float32"}
    try:
        errors = step_errors(job[0], job[1], "cuda", job[2])
    except Exception as error:
        return record | {"ok": False, "failure": f"{type(error).__name__}: {error}"[:600]}
    worst = max(errors, key=lambda name: errors[name])
    return record | {"ok": errors[worst] <= 1e-4, "worst": [worst, errors[worst]], "errors": errors}


def check_compiled() -> dict[str, object]:
    """`torch.compile(fullgraph=True)` gives the same gradients."""
    record: dict[str, object] = {"case": "torch.compile", "dtype": "float32"}
    try:
        error = compiled_difference("cuda")
    except Exception as failure:
        return record | {"ok": False, "failure": f"{type(failure).__name__}: {failure}"[:600]}
    return record | {"ok": error <= 1e-5, "worst": ["gradient", error]}


def check(job: tuple[Case, torch.dtype, int]) -> dict[str, object]:
    """One case in one dtype: its errors, or why it failed."""
    case, dtype, seed = job
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cuda.matmul.allow_tf32 = False
    begin = time.time()
    record: dict[str, object] = {"case": case.name, "dtype": str(dtype).split(".")[-1]}
    try:
        errors = relative_errors(case, dtype, "cuda", seed)
    except Exception as error:
        return record | {"ok": False, "failure": f"{type(error).__name__}: {error}"[:600]}
    worst = max(errors, key=lambda name: 9.0 if errors[name] != errors[name] else errors[name])
    return record | {
        "ok": all(e <= BOUNDS[dtype] for e in errors.values()),
        "worst": [worst, errors[worst]],
        "errors": errors,
        "seconds": time.time() - begin,
    }


def about(seed: int, wanted: int) -> dict[str, object]:
    """Where the records come from, and how many there are when all are there."""
    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": "python tests/ops/retention_triton/check_gpu.py",
        "bounds": {str(dtype).split(".")[-1]: bound for dtype, bound in BOUNDS.items()},
        "seed": seed,
        "cases": wanted,
    }


def records_of(
    jobs: list[tuple[Case, torch.dtype, int]], seed: int, workers: int
) -> Iterator[dict[str, object]]:
    """Every case's record as it ends, so that a run cut short leaves what it found."""
    # a process for each case: an illegal access would spoil every later case of its process
    with ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        waiting = [pool.submit(check, job) for job in jobs]
        waiting += [pool.submit(check_steps, (case, torch.float32, seed)) for case in STEP_CASES]
        waiting.append(pool.submit(check_compiled))
        for done in as_completed(waiting):
            yield done.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--small", action="store_true", help="one small case, for memory checkers")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="one dtype only")
    parser.add_argument("--match", default="", help="only cases whose name holds this")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--out", help="write the records as JSON here")
    arguments = parser.parse_args()
    # float32 first: it takes longer to compile
    jobs = [
        (case, dtype, arguments.seed + i)
        for dtype in (torch.float32, torch.bfloat16)
        for i, case in enumerate(GPU_CASES)
        if arguments.match in case.name and arguments.dtype in (None, str(dtype).split(".")[-1])
    ]
    if arguments.small:
        found = iter([check((small(GPU_CASES[2]), dtype, arguments.seed)) for dtype in BOUNDS])
        wanted = len(BOUNDS)
    else:
        found = records_of(jobs, arguments.seed, arguments.workers)
        wanted = len(jobs) + len(STEP_CASES) + 1
    records: list[dict[str, object]] = []
    for record in found:
        records.append(record)
        told = record.get("failure") or "{0[0]} {0[1]:.1e}".format(record["worst"])
        above = {k: f"{e:.1e}" for k, e in record.get("errors", {}).items() if not e <= 5e-3}
        verdict = "ok  " if record["ok"] else "FAIL"
        print(verdict, record["dtype"], record["case"], told, above, flush=True)
        if arguments.out:
            report = about(arguments.seed, wanted) | {"records": records}
            Path(arguments.out).write_text(json.dumps(report, indent=1))
    passed = sum(bool(record["ok"]) for record in records)
    print(f"{passed} of {len(records)} passed, seed {arguments.seed}")
    os._exit(0 if passed == wanted else 1)


if __name__ == "__main__":
    main()
