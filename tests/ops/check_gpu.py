"""GPU checks of the ops where there is no pytest: `python .../check_gpu.py`.

Cases run in several processes because compiling, not computing, takes the time. Prints one line a
case as it ends and exits 1 if any error is above its bound (1e-2 for bfloat16, 1e-4 for float32).

Cases that no file of results/bench has a record of: `--missing`.

Under a memory checker: `compute-sanitizer --tool memcheck python .../check_gpu.py --small` (and
`--tool racecheck`): one small case of each dtype, in one process.
"""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "src"):
    sys.path.insert(0, str(folder))

import torch  # noqa: E402

from tests.ops.decoding.cases import GPU_CHECKS  # noqa: E402
from tests.ops.feature_maps import cases as maps  # noqa: E402
from tests.ops.gated import cases as gated  # noqa: E402
from tests.ops.linear.cases import CHECKS as PRODUCTS  # noqa: E402
from tests.ops.local_attention import fused as local  # noqa: E402
from tests.ops.mixing.cases import difference, dots_errors  # noqa: E402
from tests.ops.order_weights import cases as orders  # noqa: E402
from tests.ops.retention.fused import (  # noqa: E402
    GPU_CASES,
    STEP_CASES,
    compiled_difference,
    relative_errors,
    small,
    step_errors,
)
from tests.ops.rms_norm import cases as norms  # noqa: E402
from tests.ops.short_convolution import cases as heads  # noqa: E402
from vort.lab.report.provenance import plain_command  # noqa: E402

BOUNDS = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
LAYERS = {"a layer at once is its ops": difference, "sums left for the window": dots_errors}
CHECKS = PRODUCTS | GPU_CHECKS | LAYERS
COMPILED = {
    "torch.compile retention": compiled_difference,
    "torch.compile local attention": local.compiled_difference,
    "torch.compile feature maps": maps.compiled_difference,
    "torch.compile rms_norm": norms.compiled_difference,
    "torch.compile order_weights": orders.compiled_difference,
}


Job = tuple[str, Any, torch.dtype, int]


def name_of(job: Job) -> tuple[str, str]:
    """The case and the type of a job, as records have them."""
    kind, case, dtype, _ = job
    return f"{kind} {'' if case is None else case.name}".strip(), str(dtype).split(".")[-1]


def recorded() -> set[tuple[str, str]]:
    """Cases and types that a file of results/bench has a record of."""
    return {
        (record["case"], record["dtype"])
        for path in (ROOT / "results" / "bench").glob("gpu_check*.json")
        for record in json.loads(path.read_text()).get("records", [])
    }


def errors_of(job: Job, device: str = "cuda") -> dict[str, float]:
    """What one job finds; its kind says which function is asked."""
    kind, case, dtype, seed = job
    if kind == "retention":
        return relative_errors(case, dtype, device, seed)
    if kind == "step":
        return step_errors(case, dtype, device, seed)
    if kind == "local attention":
        return local.relative_errors(case, dtype, device, seed)
    if kind == "local attention is causal to the bit":
        return {"numbers of the past that change": local.changed_past(device, dtype)}
    if kind in ("hedgehog", "favor"):
        return maps.relative_errors(case, dtype, device, seed)
    if kind == "rms_norm":
        return norms.relative_errors(case, dtype, device, seed)
    if kind == "gated asked":
        return gated.relative_errors(case, dtype, device, seed)
    if kind == "heads":
        return heads.relative_errors(case, dtype, device, seed)
    if kind == "heads, steps in place":
        return heads.step_errors(case, dtype, device, seed)
    if kind in CHECKS:
        return CHECKS[kind](dtype, device, seed)
    if kind == "order_weights":
        return orders.relative_errors(case, dtype, device, seed)
    return {"gradient": COMPILED[kind](device)}


def bound_of(job: Job) -> float:
    """The largest error that passes."""
    kind, _, dtype, _ = job
    if kind.startswith("torch.compile"):
        return 1e-5
    # whatever the type of everything else
    return BOUNDS[torch.bfloat16 if "bfloat16" in kind else dtype]


def check(job: Job) -> dict[str, object]:
    """One case in one dtype: its errors, or why it failed."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cuda.matmul.allow_tf32 = False
    begin = time.time()
    name, dtype = name_of(job)
    record: dict[str, object] = {"case": name, "dtype": dtype}
    try:
        errors = errors_of(job)
    except Exception as error:
        return record | {"ok": False, "failure": f"{type(error).__name__}: {error}"[:600]}
    worst = max(errors, key=lambda name: 9.0 if errors[name] != errors[name] else errors[name])
    return record | {
        "ok": all(e <= bound_of(job) for e in errors.values()),
        "worst": [worst, errors[worst]],
        "errors": errors,
        "seconds": time.time() - begin,
    }


def all_jobs(seed: int) -> list[Job]:
    """Every check, those that take longest first."""
    float32, bfloat16 = torch.float32, torch.bfloat16
    jobs: list[Job] = [(kind, None, float32, seed) for kind in COMPILED]
    for dtype in (float32, bfloat16):  # float32 takes longer to compile
        jobs += [("local attention", case, dtype, seed) for case in local.GPU_CASES]
        jobs.append(("local attention is causal to the bit", None, dtype, seed))
        jobs += [("retention", case, dtype, seed + i) for i, case in enumerate(GPU_CASES)]
        jobs += [(case.kind, case, dtype, seed) for case in maps.GPU_CASES]
        jobs += [("rms_norm", case, dtype, seed) for case in norms.GPU_CASES]
        jobs += [("gated asked", case, dtype, seed) for case in gated.GPU_CASES]
        jobs += [("heads", case, dtype, seed) for case in heads.GPU_CASES]
        jobs += [("heads, steps in place", case, dtype, seed) for case in heads.STEPS]
        jobs += [(name, None, dtype, seed) for name in CHECKS]
    # float32 alone: weights of orders know no other type
    jobs += [("order_weights", case, float32, seed) for case in orders.GPU_CASES]
    return jobs + [("step", case, float32, seed) for case in STEP_CASES]


def about(seed: int, wanted: int) -> dict[str, object]:
    """Where the records come from, and how many there are when all are there."""
    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": f"python tests/ops/{plain_command(sys.argv)}",
        "commit": os.environ.get("VORT_COMMIT", "unknown: set VORT_COMMIT"),
        "bounds": {str(dtype).split(".")[-1]: bound for dtype, bound in BOUNDS.items()},
        "seed": seed,
        "cases": wanted,
    }


def records_of(jobs: list[Job], workers: int) -> Iterator[dict[str, object]]:
    """Every case's record as it ends, so that a run cut short leaves what it found."""
    # a process for each case: an illegal access would spoil every later case of its process
    with ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        waiting = [pool.submit(check, job) for job in jobs]
        for done in as_completed(waiting):
            yield done.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--small", action="store_true", help="one small case, for memory checkers")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="one dtype only")
    parser.add_argument("--match", default="", help="only cases whose name matches this")
    parser.add_argument("--missing", action="store_true", help="only cases without a record")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--out", help="write the records as JSON here")
    arguments = parser.parse_args()
    found_before = recorded() if arguments.missing else set()
    jobs = []
    for job in all_jobs(arguments.seed):
        name, dtype = name_of(job)
        if re.search(arguments.match, name) and arguments.dtype in (None, dtype):
            jobs += [job] * ((name, dtype) not in found_before)
    if arguments.small:
        kinds = [
            ("retention", small(GPU_CASES[2])),
            ("local attention", local.GPU_CASES[0]),
            *((case.kind, case) for case in (maps.MapCase(), maps.MapCase("favor", shift=True))),
        ]
        jobs = [(*kind, dtype, arguments.seed) for kind in kinds for dtype in BOUNDS]
    # a memory checker watches one process
    found = map(check, jobs) if arguments.small else records_of(jobs, arguments.workers)
    records: list[dict[str, object]] = []
    for record in found:
        records.append(record)
        told = record.get("failure") or "{0[0]} {0[1]:.1e}".format(record["worst"])
        above = {k: f"{e:.1e}" for k, e in record.get("errors", {}).items() if not e <= 5e-3}
        verdict = "ok  " if record["ok"] else "FAIL"
        print(verdict, record["dtype"], record["case"], told, above, flush=True)
        if arguments.out:
            passed = sum(bool(r["ok"]) for r in records)
            report = about(arguments.seed, len(jobs)) | {"passed": passed, "records": records}
            Path(arguments.out).write_text(json.dumps(report, indent=1))
    passed = sum(bool(record["ok"]) for record in records)
    print(f"{passed} of {len(jobs)} passed, seed {arguments.seed}")
    os._exit(0 if passed == len(jobs) else 1)


if __name__ == "__main__":
    main()
