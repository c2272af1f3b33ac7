"""What one layer costs: seconds and bytes."""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

__all__ = ["cost_of_layer"]


def cost_of_layer(config: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Seconds and peak bytes of one attention layer at one length, forward and with backward.

    In a process of its own: the peak of a process counts from its start. `settings`: length, batch,
    repeats. Bytes are those of the device; on a CPU, what the process grew by, read on Linux only.
    """
    request = json.dumps({"config": config, **settings})
    command = [
        sys.executable,
        "-c",
        "from vort.lab.experiments.measures.cost import _cost; _cost()",
    ]
    found = subprocess.run(command, input=request, capture_output=True, text=True, check=False)
    if found.returncode:
        raise RuntimeError(found.stderr.strip().splitlines()[-1])
    result: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return result


def _cost() -> None:
    """Read a request, print the measurement: what `cost_of_layer` starts."""
    from vort.layers import VortAttention
    from vort.models import VortConfig

    request = json.loads(sys.stdin.read())
    length, batch = request["length"], request["batch"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = VortConfig(**request["config"])
    layer = VortAttention(config).to(device)
    x = torch.randn(batch, length, config.hidden_size, device=device, requires_grad=True)

    def forward() -> Tensor:
        with torch.autocast(device.type, dtype, enabled=device.type == "cuda"):
            result: Tensor = layer(x)[0]
        return result

    def both() -> None:
        forward().float().square().mean().backward()

    def infer() -> None:
        with torch.no_grad():
            forward()

    infer()
    before = _memory(device, reset=True)
    both()
    peak = _memory(device) - before
    times = {"forward": _median(infer, request["repeats"], device)}
    times["forward_backward"] = _median(both, request["repeats"], device)
    print(json.dumps({"length": length, "batch": batch, "times": times, "peak_bytes": peak}))


def _median(call: Callable[[], None], repeats: int, device: torch.device) -> float:
    """Median seconds of a call, after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        began = perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(perf_counter() - began)
    return statistics.median(times[1:])


def _memory(device: torch.device, *, reset: bool = False) -> int:
    """Bytes at most so far; with `reset`, bytes now."""
    if device.type == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        return torch.cuda.max_memory_allocated()
    which = "VmRSS:" if reset else "VmHWM:"
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(which))
