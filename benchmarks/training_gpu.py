"""Training throughput of the pilot model at n = 10,000 on a GPU, in tokens a second.

    python benchmarks/training_gpu.py [--out results/bench/training_gpu.json]

The loop of `vort train` itself: data drawn on the CPU by workers, bf16, AdamW, gradient clipping.
"""

import argparse
import json
from pathlib import Path

import torch

from vort.lab.experiments.cell import Cell
from vort.lab.experiments.pilot import TASK
from vort.lab.experiments.recall import recall_cell
from vort.lab.experiments.sizes import RECALL_TRAINING
from vort.lab.experiments.work import build_model
from vort.lab.report.folder import provenance
from vort.lab.tasks import make_task
from vort.lab.training import TrainingConfig, train

MODELS = ("vort", "power_law", "mixture", "exponential", "softmax")


def measure(cell: Cell, steps: int) -> dict[str, float | str | int]:
    settings = dict(cell.task)
    task = make_task(settings.pop("name"), **settings)
    model = build_model(cell, task)
    options = {**cell.training, "steps": steps, "checkpoint_every": None, "test_sequences": 0}
    config = TrainingConfig(**options, evaluation_sequences=1, progress=False, log_every=steps)
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
    training = dict(RECALL_TRAINING["paper"])
    training.pop("evaluation_sequences")
    rows = []
    for name in arguments.models.split(","):
        cell = recall_cell("pilot", "paper", name, 0, TASK["paper"], training)
        rows.append(measure(cell, arguments.steps))
        print(f"{name:<24}{rows[-1]['tokens_per_second'] / 1e6:8.2f} M tokens/s", flush=True)
    if arguments.out:
        arguments.out.write_text(
            json.dumps({"made_by": provenance(), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
