"""Local attention on a GPU, kernel by kernel: RoPE, forward, and the backward in its two forms.

    python benchmarks/local_attention_gpu.py [--batch 4 --length 8192 --window 128] [--runs 16,32]

bfloat16, 16 heads of 64, entropy asked for, gradients to queries, keys and values. Forms of the
backward: `walk`, all gradients in one kernel, also with as many blocks in a walk as `--runs` names;
`apart`, one kernel for queries and one for keys and values, as it is where a walk
does not apply. Forms take turns, round after round; medians of rounds, microseconds. `floor`: the
time that a copy of as many bytes takes as a form has to read and write.
"""

import argparse
import importlib
import statistics
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from vort.ops.local_attention import local_attention

HEADS, DIM = 16, 64
# Tensors of the size of q that a form reads or writes in a forward and backward pass; RoPE turns
# two of them and two gradients.
TENSORS = {"walk": 4 + 8 + 8, "apart": 4 + 12 + 8}


def forms(attention: Any, runs: list[int]) -> dict[str, Callable[[], Any]]:
    """What is changed for each form of the backward, by its name."""
    found: dict[str, Callable[[], Any]] = {
        f"walk {run}": partial(mock.patch.object, attention, "choose_run", return_value=run)
        for run in runs
    }
    apart = partial(mock.patch.dict, attention.WALKS, clear=True)
    return {"walk": nullcontext, "apart": apart} | found


def kernels(step: Callable[[], None]) -> dict[str, float]:
    """Microseconds of a step by kernel."""
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        step()
        torch.cuda.synchronize()
    return {
        event.key: event.self_device_time_total
        for event in record.key_averages()
        if event.self_device_time_total > 0
    }


def copy_us(size: int) -> float:
    """Microseconds to read and write `size` bytes in all."""
    x = torch.empty(size // 2, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)

    def copy() -> None:
        y.copy_(x)

    copy()
    return statistics.median(sum(kernels(copy).values()) for _ in range(5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--runs", default="", help="blocks in a walk, with commas between")
    given = parser.parse_args()
    attention = importlib.import_module("vort.ops.local_attention.triton.attention")
    shape = (given.batch, given.length, HEADS, DIM)
    leaves = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    ]
    back = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    slope = torch.randn(shape[:3], device="cuda")

    def step() -> None:
        options: Any = {"rope_base": 1e4, "return_entropy": True}
        o, entropy = local_attention(*leaves, given.window, **options)
        torch.autograd.grad([o, entropy], leaves, [back, slope])

    asked = forms(attention, [int(run) for run in given.runs.split(",") if run])
    times: dict[str, dict[str, list[float]]] = {form: defaultdict(list) for form in asked}
    for attempt in range(given.rounds + 2):
        for form, changed in asked.items():
            with changed():
                found = kernels(step)
            for name, us in found.items() if attempt > 1 else ():
                times[form][name].append(us)
    size = leaves[0].nbytes
    for form, by_name in times.items():
        medians = {name: statistics.median(us) for name, us in by_name.items()}
        floor = copy_us(TENSORS[form.split()[0]] * size)
        print(f"{form}: {sum(medians.values()):.0f} us, floor {floor:.0f}")
        for name, us in sorted(medians.items(), key=lambda pair: -pair[1]):
            print(f"    {us:8.1f}  {name[:80]}")


if __name__ == "__main__":
    main()
