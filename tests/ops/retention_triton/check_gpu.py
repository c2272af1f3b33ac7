"""GPU checks where there is no pytest: `python tests/ops/retention_triton/check_gpu.py`.

Cases run in several processes because compiling, not computing, takes the time. Prints one line a
case and exits 1 if any error is above its bound (1e-2 for bfloat16, 1e-4 for float32).

Under a memory checker: `compute-sanitizer --tool memcheck python .../check_gpu.py --small` (and
`--tool racecheck`): one small case of each dtype, in one process.
"""

import argparse
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
for folder in (ROOT, ROOT / "src"):
    sys.path.insert(0, str(folder))

import torch  # noqa: E402

from tests.ops.retention_triton.cases import GPU_CASES, Case, relative_errors, small  # noqa: E402

BOUNDS = {torch.bfloat16: 1e-2, torch.float32: 1e-4}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--small", action="store_true", help="one small case, for memory checkers")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--out", help="write the records as JSON here")
    arguments = parser.parse_args()
    jobs = [
        (case, dtype, arguments.seed + i)
        for i, case in enumerate(GPU_CASES)
        for dtype in (torch.bfloat16, torch.float32)
    ]
    if arguments.small:
        records = [check((small(jobs[4][0]), dtype, arguments.seed)) for dtype in BOUNDS]
    else:
        with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
            records = list(pool.map(check, jobs))
    for record in records:
        told = record.get("failure") or "{0[0]} {0[1]:.1e}".format(record["worst"])
        above = {k: f"{e:.1e}" for k, e in record.get("errors", {}).items() if not e <= 5e-3}
        print("ok  " if record["ok"] else "FAIL", record["dtype"], record["case"], told, above)
    passed = sum(bool(record["ok"]) for record in records)
    print(f"{passed} of {len(records)} passed, seed {arguments.seed}")
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(records, indent=1))
    os._exit(0 if passed == len(records) else 1)


if __name__ == "__main__":
    main()
