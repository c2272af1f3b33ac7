"""The kernels on a GPU: every gradient against float64, twice, into memory filled with NaN."""

import pytest
import torch

pytest.importorskip("triton")
from tests.ops.check_gpu import CHECKS, Job, all_jobs, bound_of, errors_of

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

# heads and CHECKS: check_gpu.py has them, and those of a step decoding/test_interpreter.py
JOBS = [job for job in all_jobs(0) if job[0] not in CHECKS and not job[0].startswith("heads")]


def name_of(job: Job) -> str:
    kind, case, dtype, _ = job
    return f"{kind} {'' if case is None else case.name} {dtype}"


@pytest.mark.parametrize("job", JOBS, ids=name_of)
def test_every_output_and_gradient_equals_exact(job: Job) -> None:
    seed = torch.seed() % 2**31
    errors = errors_of((*job[:3], seed))
    assert all(error <= bound_of(job) for error in errors.values()), (errors, seed)
