"""Where the time of one training step of a table's row goes on a GPU.

    python benchmarks/profile_training_gpu.py [--table pilot] [--model vort]
        [--out profile_training_gpu.json]

The row's model at the size of the paper, bf16, a batch that stays on the GPU. Printed and written:
milliseconds of a step as it is launched and as it is recorded and replayed (cells are trained so),
of each module's forward, and of each kernel, summed over its calls in a step. Modules are timed by
hooks, and a block that has any computes all positions, not those alone that are asked for.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from vort.lab.experiments import EXPERIMENTS
from vort.lab.experiments.models import build_model
from vort.lab.report.provenance import provenance
from vort.lab.tasks import make_task
from vort.lab.training.data import compact, fill_up
from vort.lab.training.scorer import Scorer
from vort.models import RecordedStep

STEPS = 20


def training_step(
    table: str, name: str
) -> tuple[torch.nn.Module, Callable[[], None], Callable[[], None]]:
    """The model, and one step of its training, as it is launched and as it is recorded."""
    cells = EXPERIMENTS[table].cells("paper", None)
    cell = next((c for c in cells if c.model == name), None)
    if cell is None:
        known = ", ".join(dict.fromkeys(c.model for c in cells)) or "none without files"
        sys.exit(f"{table} must have a row {name!r} at the size of the paper; it has {known}")
    task = make_task(**cell.task)
    model = build_model(task, cell.config, cell.seed).cuda().train()
    scorer = Scorer(model, task.num_classes)
    rows = fill_up(compact(task.batch("train", list(range(cell.training["batch_size"])))))
    batch = {key: x.cuda() for key, x in rows.items()}
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def loss(given: Any) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return scorer(given)["loss"]

    replay = RecordedStep(model, loss)

    def launched() -> None:
        loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    def recorded() -> None:
        replay(batch)
        optimizer.step()
        optimizer.zero_grad()

    return model, launched, recorded


def step_ms(step: Callable[[], None]) -> float:
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / STEPS * 1e3


def forward_ms(model: torch.nn.Module, step: Callable[[], None]) -> dict[str, float]:
    """Milliseconds of each module's forward, the least of five steps; parts are in the whole."""
    spans: dict[str, list[list[torch.cuda.Event]]] = defaultdict(list)

    def marked() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    hooks = []
    for name, module in model.named_modules():
        hooks += [
            module.register_forward_pre_hook(lambda *_, n=name: spans[n].append([marked()])),
            module.register_forward_hook(lambda *_, n=name: spans[n][-1].append(marked())),
        ]
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    for hook in hooks:
        hook.remove()
    # The first module is the model itself, which the scorer takes apart and never calls.
    return {n: min(a.elapsed_time(b) for a, b in pairs) for n, pairs in spans.items() if n}


def kernel_ms(step: Callable[[], None]) -> list[dict[str, Any]]:
    """Every kernel's milliseconds and calls in a step, the longest first."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as record:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    rows = [
        {"kernel": e.key[:120], "ms": e.self_device_time_total / 3e3, "calls": e.count / 3}
        for e in record.key_averages()
        if e.device_type == torch.autograd.DeviceType.CUDA and e.self_device_time_total > 0
    ]
    return sorted(rows, key=lambda row: -row["ms"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--table", default="pilot", choices=sorted(EXPERIMENTS))
    parser.add_argument("--model", default="vort", help="a row of the table")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    model, step, recorded = training_step(arguments.table, arguments.model)
    # Recorded first: autograd remembers the stream that a gradient was first asked for on.
    again = step_ms(recorded)
    found = {
        "table": arguments.table,
        "model": arguments.model,
        "recorded_step_ms": again,
        "step_ms": step_ms(step),
        "forward_ms": forward_ms(model, step),
        "kernels": kernel_ms(step),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "made_by": provenance(),
    }
    total = sum(row["ms"] for row in found["kernels"])
    print(
        f"{arguments.table}, {arguments.model}: {found['step_ms']:.2f} ms a step, "
        f"{again:.2f} recorded; kernels {total:.2f}"
    )
    for name, milliseconds in found["forward_ms"].items():
        print(f"{milliseconds:8.3f}  {name}")
    for row in found["kernels"][:30]:
        print(f"{row['ms']:8.3f} {row['calls']:6.1f}  {row['kernel']}")
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
