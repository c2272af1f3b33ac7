"""Retention against causal softmax attention on a CPU: time, growth, memory, one decoding step.

    python benchmarks/retention_cpu.py [--rounds 15] [--busy 2]
        [--out results/bench/retention_cpu.json]

float32, B = 1, H = 4, K = V = 64, S = 8, two threads. The candidates take turns within every round,
so that whatever else the machine does falls on all of them alike; a ratio is that of the best
times, the medians are printed beside them. Then the longer ones once more, beside as many processes
as `--busy` says that never rest: no time there is like another, so those ratios are of medians, and
so are the idle ones that they are compared with. Memory is the peak resident size of a fresh
process that runs forward and backward once, less its size before it made the inputs.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from vort.lab.report.provenance import provenance
from vort.ops.retention import empty_state, retention, retention_step

HEADS, WIDTH, SCALES, THREADS = 4, 64, 8, 2
RATES = (-3.0, 0.8)  # powers of ten: from a thousand steps to a fraction of one

# time(8192) / SDPA beside busy processes, over the same with the machine to itself
BESIDE = "ratio(8192) busy / idle"

TARGETS = {
    "time(8192) / SDPA": 0.33,
    "time(2048) / SDPA": 1.0,
    "time(16384) / time(8192)": 2.2,
    "memory(S=8) / memory(S=1) at 16384": 1.5,
    "one step [ms]": 0.5,
    BESIDE: 2.0,
}


def inputs(length: int, scales: int) -> list[torch.Tensor]:
    """q, k, v, write that need gradients, and fixed decays."""
    q, k, v = (torch.randn(1, length, HEADS, WIDTH).requires_grad_() for _ in range(3))
    write = torch.rand(1, length, HEADS, scales).requires_grad_()
    return [q, k, v, write, -torch.logspace(*RATES, scales)]


def train_retention(length: int, *, gated: bool = False) -> Callable[[], None]:
    tensors = inputs(length, SCALES)
    read = torch.rand(1, length, HEADS, SCALES).requires_grad_() if gated else None
    upstream = torch.randn(1, length, HEADS, WIDTH)

    def run() -> None:
        retention(*tensors, read=read, backend="chunk")[0].backward(upstream)

    return run


def train_attention(length: int) -> Callable[[], None]:
    q, k, v = (torch.randn(1, HEADS, length, WIDTH).requires_grad_() for _ in range(3))
    upstream = torch.randn(1, HEADS, length, WIDTH)
    attend = torch.nn.functional.scaled_dot_product_attention

    def run() -> None:
        attend(q, k, v, is_causal=True).backward(upstream)

    return run


def decode_step() -> Callable[[], None]:
    state = empty_state(1, HEADS, SCALES, WIDTH, WIDTH)
    token = [torch.rand(1, HEADS, size) for size in (WIDTH, WIDTH, WIDTH, SCALES)]
    log_decay = -torch.logspace(*RATES, SCALES)

    @torch.no_grad()
    def run() -> None:
        retention_step(state, *token, log_decay, inplace=True)

    return run


def take_turns(candidates: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every candidate in every round."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for run in candidates.values():
        run()
    for _ in range(rounds):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return times


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many processes beside this one that never rest."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(1)  # until they have started
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def ratio(times: dict[str, list[float]], name: str) -> float:
    """Median time of retention over that of attention."""
    return statistics.median(times[name]) / statistics.median(times["SDPA 8192"])


def resident(which: str) -> int:
    """Bytes of this process in memory: now (VmRSS) or at most (VmHWM, unlike ru_maxrss its own)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(which + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {which} in /proc/self/status: memory is measured on Linux only")


def measure_memory(scales: int, length: int) -> None:
    """Print the peak of one forward and backward over the size before the inputs, in bytes."""
    torch.set_num_threads(THREADS)
    retention(*inputs(16, 1))[0].sum().backward()  # libraries load on first use
    before = resident("VmRSS")
    tensors = inputs(length, scales)
    retention(*tensors, backend="chunk")[0].backward(torch.ones(1, length, HEADS, WIDTH))
    print(resident("VmHWM") - before)


def memory_in_a_process(scales: int, length: int) -> int:
    command = [sys.executable, __file__, "--memory-of", str(scales), str(length)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout)


def measure(rounds: int, busy: int) -> dict[str, object]:
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    load = os.getloadavg()[0]
    steps = take_turns({"step": decode_step()}, 200 * rounds)
    times = take_turns(
        {
            "SDPA 2048": train_attention(2048),
            "retention 2048": train_retention(2048),
            "retention 2048, read": train_retention(2048, gated=True),
            "SDPA 8192": train_attention(8192),
            "retention 8192": train_retention(8192),
            "retention 8192, read": train_retention(8192, gated=True),
            "retention 16384": train_retention(16384),
        },
        rounds,
    )
    long = {"SDPA 8192": train_attention(8192), "retention 8192": train_retention(8192)}
    long["retention 8192, read"] = train_retention(8192, gated=True)
    beside: dict[str, list[float]] = {}
    if busy:
        with neighbours(busy):
            beside = take_turns(long, max(5, rounds // 2))
    times.update(steps)
    best = {name: min(values) for name, values in times.items()}
    memory = {scales: memory_in_a_process(scales, 16384) for scales in (1, SCALES)}
    ratios = {
        "time(8192) / SDPA": best["retention 8192"] / best["SDPA 8192"],
        "time(2048) / SDPA": best["retention 2048"] / best["SDPA 2048"],
        "time(16384) / time(8192)": best["retention 16384"] / best["retention 8192"],
        "memory(S=8) / memory(S=1) at 16384": memory[SCALES] / memory[1],
        "one step [ms]": best["step"] * 1e3,
    }
    if busy:
        ratios[BESIDE] = ratio(beside, "retention 8192") / ratio(times, "retention 8192")
    targets = {name: target for name, target in TARGETS.items() if name in ratios}
    return {
        "made_by": {
            **provenance(),
            "device": platform.processor() or platform.machine(),
            "threads": THREADS,
            "load_average_before": load,
        },
        "shape": {"B": 1, "H": HEADS, "K": WIDTH, "V": WIDTH, "S": SCALES, "dtype": "float32"},
        "rounds": rounds,
        "best_ms": {name: value * 1e3 for name, value in best.items()},
        "median_ms": {name: statistics.median(x) * 1e3 for name, x in times.items()},
        "memory_mib": {f"S={scales}": value / 2**20 for scales, value in memory.items()},
        "busy": {
            "processes": busy,
            "median_ms": {name: statistics.median(x) * 1e3 for name, x in beside.items()},
            "ratio_to_SDPA": {
                name: {"idle": ratio(times, name), "busy": ratio(beside, name)}
                for name in list(beside)[1:]
            },
        },
        "ratios": ratios,
        "targets": targets,
        "met": {name: ratios[name] <= target for name, target in targets.items()},
    }


def show(result: dict) -> None:
    if result["made_by"]["load_average_before"] > 0.5:
        print("others use this machine: parallel runs wait for them, and ratios come out too high")
    print(f"{'forward + backward':<38}{'best ms':>10}{'median ms':>12}")
    for name, value in result["best_ms"].items():
        print(f"{name:<38}{value:>10.2f}{result['median_ms'][name]:>12.2f}")
    for name, value in result["memory_mib"].items():
        print(f"{'peak memory at 16384, ' + name:<38}{value:>8.1f} MiB")
    busy = result["busy"]
    beside = f", beside {busy['processes']} busy"
    for name, value in busy["median_ms"].items():
        print(f"{name + beside:<38}{value:>22.2f}")
    for name, value in busy["ratio_to_SDPA"].items():
        print(f"{name + ' / SDPA':<38}{value['idle']:>10.3f} idle{value['busy']:>7.3f} busy")
    print(f"\n{'claim':<38}{'measured':>10}{'target':>12}")
    for name, value in result["ratios"].items():
        verdict = "met" if result["met"][name] else "MISSED"
        print(f"{name:<38}{value:>10.3f}{result['targets'][name]:>12.2f}  {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--busy", type=int, default=2, help="busy processes beside it; 0: none")
    parser.add_argument("--out", type=Path, default=Path("results/bench/retention_cpu.json"))
    parser.add_argument("--memory-of", nargs=2, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        measure_memory(*arguments.memory_of)
        return
    result = measure(arguments.rounds, arguments.busy)
    show(result)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"\nwritten to {arguments.out}")


if __name__ == "__main__":
    main()
