"""Training throughput of the pilot model at n = 10,000 on a GPU, in tokens a second.

    python benchmarks/training_gpu.py [--out results/bench/training_gpu.json]

The loop of `vort train` itself: data drawn on the CPU by workers, bf16, AdamW, gradient clipping.
"""

import argparse
import json
from pathlib import Path

import torch

from vort.lab.experiments import EXPERIMENTS
from vort.lab.experiments.cell import Cell
from vort.lab.experiments.models import build_model
from vort.lab.report.provenance import provenance
from vort.lab.tasks import make_task
from vort.lab.training import TrainingConfig, train

MODELS = ("vort", "power_law", "mixture", "exponential", "softmax")


def measure(cell: Cell, steps: int) -> dict[str, float | str | int]:
    task = make_task(**cell.task)
    model = build_model(task, cell.config, cell.seed)
    options = {**cell.training, "steps": steps, "checkpoint_every": None, "test_sequences": 0}
    options |= {"evaluation_sequences": 1, "progress": False, "log_every": steps}
    options |= {"record_steps": True}  # as cells are trained
    config = TrainingConfig(**options)
    torch.cuda.reset_peak_memory_stats()
    found = train(model, task, config)
    return {
        "model": cell.model,
        "tokens_per_second": round(found.tokens_per_second),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "steps": steps,
        "batch_size": config.batch_size,
        "length": task.length,
        "parameters": sum(x.numel() for x in model.parameters()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    cells = EXPERIMENTS["pilot"].cells("paper", None)
    rows = []
    for name in arguments.models.split(","):
        rows.append(measure(next(c for c in cells if c.model == name), arguments.steps))
        print(f"{name:<24}{rows[-1]['tokens_per_second'] / 1e6:8.2f} M tokens/s", flush=True)
    if arguments.out:
        arguments.out.write_text(
            json.dumps({"made_by": provenance(), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
