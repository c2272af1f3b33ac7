"""Every kernel of the GPU cases compiled for Hopper, no GPU needed: `python .../check_compiled.py`.

Looks for two faults in the machine code (machine_code.py says which) and exits 1 if there are any;
names kernels whose products the assembler has taken apart, too, which are right but slow.
Worth a run with every Triton that is to be supported: another one is another compiler.
"""

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "src"):
    sys.path.insert(0, str(folder))

import triton  # noqa: E402

from tests.ops.check_gpu import Job, all_jobs, errors_of  # noqa: E402
from tests.ops.machine_code import Launch, compiled, recorded  # noqa: E402

# The same kernels again.
ELSEWHERE = ("torch.compile",)


def launches_of(job: Job) -> list[Launch]:
    """What one GPU case would launch."""
    with recorded() as found:
        errors_of(job, "cpu")
    return list(found)


def faults_of(launch: Launch) -> tuple[list[str], bool]:
    """What is wrong with a kernel, and whether its products are taken apart."""
    code = compiled(launch)
    return code.faults(), code.taken_apart()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--match", default="", help="only cases whose name holds this")
    arguments = parser.parse_args()
    cases: dict[Launch, str] = {}
    for job in all_jobs(0):
        name = f"{job[0]} {'' if job[1] is None else job[1].name} {job[2]}"
        if arguments.match in name and not job[0].startswith(ELSEWHERE):
            for launch in launches_of(job):
                cases.setdefault(launch, name)
    print(f"{len(cases)} kernels, Triton {triton.__version__}", flush=True)
    faulty = 0
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        found = pool.map(faults_of, cases, chunksize=4)
        for launch, (faults, slow) in zip(cases, found, strict=True):
            if slow:
                print(
                    f"SLOW {launch.kernel}, {cases[launch]}: products are taken apart", flush=True
                )
            if faults:
                faulty += 1
                print(f"FAIL {launch.kernel}, {cases[launch]}: {faults[0]}", flush=True)
    print(f"{len(cases) - faulty} of {len(cases)} kernels without fault")
    sys.exit(faulty > 0)


if __name__ == "__main__":
    main()
