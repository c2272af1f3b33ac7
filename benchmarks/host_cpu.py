"""The host's time of a training step, without a GPU: a layer as one function against op by op.

    python benchmarks/host_cpu.py [--rounds 15] [--layers 6] [--out results/bench/host_cpu.json]

Kernels are believed to take tensors of a CPU, and launches do nothing: what is left is what the
host does around them (questions, checks, allocations, autograd) and products too small to matter.
Numbers that come out mean nothing. Both ways take turns within every round; a figure is the median
of its rounds, milliseconds a layer. A GPU's host adds its launches and is as fast as it is: compare
the two ways.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import vort.ops.mixing  # noqa: F401  # all kernels of a layer
from vort.lab.report.provenance import provenance
from vort.layers import vort_attention
from vort.models import VortConfig, VortModel


def pretend() -> None:
    """Kernels take whatever they are given, and are not run."""

    def take(*tensors: Any) -> bool:
        return True

    changes = {
        "kernels_take": take,
        "launch": lambda *given, **constants: None,
        "require_kernels": lambda *given: None,
    }
    for name, module in list(sys.modules.items()):
        for function, other in changes.items():
            if name.startswith("vort.") and hasattr(module, function):
                setattr(module, function, other)
    interface: Any = sys.modules["vort.ops.retention.interface"]
    interface._choose = lambda *given: ("triton", "asked for")


def milliseconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)  # it takes its time over small products
    torch.manual_seed(0)
    config = VortConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=arguments.layers,
        num_attention_heads=4, intermediate_size=32,
    )  # fmt: skip
    model = VortModel(config).train()
    pretend()
    ids = torch.zeros(4, 16, dtype=torch.long)

    def forward() -> Any:
        return model(ids, use_cache=False).last_hidden_state

    def both() -> None:
        hidden = forward()
        torch.autograd.backward(hidden, torch.empty_like(hidden))
        model.zero_grad(set_to_none=True)

    passes = {"forward": forward, "forward and backward": both}
    ways = {"at once": vort_attention.attention_at_once, "op by op": lambda *given: None}
    times: dict[tuple[str, str], list[float]] = {(w, p): [] for w in ways for p in passes}
    gc.disable()
    for number in range(arguments.rounds + 3):
        for way, function in ways.items():
            with mock.patch.object(vort_attention, "attention_at_once", function):
                for name, call in passes.items():
                    spent = min(milliseconds(call) for _ in range(5)) / arguments.layers
                    if number >= 3:  # the first ones warm up
                        times[way, name].append(spent)
        gc.collect()
    rows = {
        way: {name: round(statistics.median(times[way, name]), 3) for name in passes}
        for way in ways
    }
    for name in passes:
        first, second = (rows[way][name] for way in ways)
        print(f"{name:22s} {first:6.2f} ms a layer at once, {second:6.2f} op by op: "
              f"{first / second:.2f}")  # fmt: skip
    record = {
        "made_by": {
            **provenance(),
            "device": platform.processor() or platform.machine(),
            "load_average_after": os.getloadavg()[0],
        },
        "rounds": arguments.rounds,
        "layers": arguments.layers,
        "ms_a_layer": rows,
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
