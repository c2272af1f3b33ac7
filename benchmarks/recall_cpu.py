"""A training step of the laptop tables' models on one CPU core, by each road of batched products.

    python benchmarks/recall_cpu.py [--rounds 5] [--out results/bench/recall_cpu.json]

PyTorch built without MKL (aarch64) multiplies a batch matrix by matrix. There `vort.ops.products`
lets NumPy do it, few readers meet tokens pair by pair instead of through states, and sums over
positions leave out those that nobody asks for. Here a step of every row is timed so and with
PyTorch's own products, in turns within each round; milliseconds are the best of all rounds.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch

from vort.lab.experiments import EXPERIMENTS
from vort.lab.experiments.models import build_model
from vort.lab.report.provenance import provenance
from vort.lab.tasks import make_task
from vort.lab.training.data import compact
from vort.lab.training.scorer import Scorer
from vort.ops import products

ROWS = {
    "pilot": ("vort", "vort_paper", "power_law", "mixture", "exponential", "softmax"),
    "label_copy": ("vort", "exponential"),
    "needles": ("vort",),
    "mqar": ("vort",),
}
STEPS = 5
ROADS = {"NumPy": True, "PyTorch": False}


def training_step(table: str, row: str) -> Callable[[], None]:
    """One step of a row's first cell, always on the same batch."""
    cell = next(c for c in EXPERIMENTS[table].cells("laptop", None) if c.model == row)
    task = make_task(**cell.task)
    model = build_model(task, cell.config, cell.seed).train()
    scorer = Scorer(model, task.num_classes)
    batch = compact(task.batch("train", list(range(cell.training["batch_size"]))))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        scorer(batch)["loss"].backward()
        optimizer.step()

    return step


def milliseconds(step: Callable[[], None], road: bool) -> float:
    """Of one step, after one to warm up."""
    products.ONE_BY_ONE = road
    step()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - began) / STEPS * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    for table, rows in ROWS.items():
        for row in rows:
            step = training_step(table, row)
            times: dict[str, list[float]] = {road: [] for road in ROADS}
            for _ in range(given.rounds):
                for road, on in ROADS.items():
                    times[road].append(milliseconds(step, on))
            best = {road: round(min(each), 1) for road, each in times.items()}
            found[f"{table} {row}"] = best
            words = ", ".join(f"{road} {ms:6.1f} ms" for road, ms in best.items())
            print(f"{table:11s} {row:12s} {words}", flush=True)
    if given.out is not None:
        about = {**provenance(), "machine": platform.machine(), "rounds": given.rounds}
        about["batched gemm"] = torch.backends.mkl.is_available()
        given.out.write_text(json.dumps({"made_by": about, "ms": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
