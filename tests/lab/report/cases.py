"""A run folder as the experiments write it, made up and small."""

import json
import math
from pathlib import Path
from typing import Any

# The smallest PNG there is: one pixel.
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c489"
    "0000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
)
MODELS = {"vort": 0.12, "mixture": 0.3, "exponential": 0.5}
BUCKETS = {"<=100": 30, "100-1000": 300, ">1000": 3000}


def accuracy(model: str, lag: float, seed: int) -> float:
    """A score that falls with the logarithm of the lag, faster for weaker models."""
    return 1 / (1 + (lag / 3000) ** 1.2 * MODELS[model] * 8) - 0.004 * seed


def cell_of(model: str, beta: float, seed: int) -> dict[str, Any]:
    """A finished cell."""
    edges = [2**n for n in range(14)]
    test = {
        name: {"accuracy": accuracy(model, lag, seed), "bits": 1.2 + lag / 9000, "count": 500}
        for name, lag in BUCKETS.items()
    }
    history: list[dict[str, Any]] = []
    for step in range(50, 2001, 50):
        loss = 2.7 * math.exp(-step / 600) + MODELS[model] + 0.02 * seed + 0.03 * math.sin(step)
        history.append(
            {"step": step, "loss": loss, "learning_rate": 3e-4, "gradient_norm": 1.0 + seed}
        )
        if step % 400 == 0:
            bits = {"bits": loss * 1.5, "accuracy": 0.5, "count": 100}
            history.append({"step": step, "validation": {"near": bits, "all": bits}})
    return {
        "experiment": "pilot",
        "scale": "laptop",
        "cell": {"task": "zipf_retrieval", "model": model, "beta": beta, "seed": seed},
        "task": {"length": 2048, "queries": 16, "beta": beta},
        "model": {"memory": model, "num_hidden_layers": 1},
        "training": {"steps": 2000, "batch_size": 16, "learning_rate": 3e-4, "seed": seed},
        "parameters": 812_345,
        "state_numbers": 33_280,
        "state_bytes": 133_120,
        "validation": test,
        "test": test,
        "history": history,
        "lags": [
            {
                "low": low,
                "high": 2 * low - 1,
                "accuracy": accuracy(model, low * 1.4, seed),
                "count": 90,
            }
            for low in edges
        ],
        "tokens_per_second": 12_345.6,
        "seconds": 321.0,
        "made_by": {"command": "vort reproduce", "vort": "0.1.0", "torch": "2.13", "device": "cpu"},
    }


def make_run(folder: Path) -> Path:
    """Two experiments: a pilot with cells and a summary, a kernel part with claims alone."""
    pilot, kernel = folder / "pilot", folder / "kernel"
    (pilot / "cells").mkdir(parents=True)
    kernel.mkdir()
    for model in MODELS:
        for beta in (1.0, 1.5):
            for seed in range(3):
                write(pilot / "cells" / f"{model}-b{beta}-s{seed}.json", cell_of(model, beta, seed))
    summary = {
        "title": "Zipf retrieval (table pilot)",
        "about": "Queries ask for the label of a key seen earlier, at lags drawn from a power law.",
        "command": "vort reproduce --only pilot --scale laptop --seeds 3",
        "sheets": [
            {
                "title": "Against the paper, beta = 1",
                "headings": ["model", "<=100", "100-1000", ">1000", "paper >1000", "verdict"],
                "rows": [
                    ["Exponential", "93.0 ± 0.4", "75.5 ± 0.9", "24.7 ± 1.1", "52.3", "reproduced"],
                    ["VORT", "99.1 ± 0.2", "89.6 ± 0.7", "62.8 ± 1.5", "79.4", "not reproduced"],
                ],
            }
        ],
        "figures": [
            {
                "file": "orders.png",
                "caption": "Learned orders",
                "command": "vort reproduce --only pilot",
            }
        ],
        "verdicts": [
            {
                "where": "table pilot",
                "states": "VORT 79.4 % at long lags, 18 points above Mixture-5",
                "measured": "62.8 % ± 1.5, 26 points above",
                "verdict": "reproduced once corrected",
                "erratum": "E14",
            }
        ],
        "notes": ["Sequences of 2,048, not 10,000: this is the laptop scale."],
        "made_by": {"command": "vort reproduce", "torch": "2.13"},
    }
    write(pilot / "summary.json", summary)
    (pilot / "orders.png").write_bytes(PIXEL)
    claims = [
        {
            "where": "theorem soe",
            "states": "S = 15 terms reach 4e-3",
            "measured": "1.2e-2 at order .7",
            "verdict": "reproduced once corrected",
            "erratum": "E2",
        },
        {
            "where": "abstract",
            "states": "Gauss-Laguerre in the rate",
            "measured": "77 % off at lag 100",
            "verdict": "not reproduced",
            "erratum": "E5",
        },
        {
            "where": "theorem quant",
            "states": "K banks cost at most log(T) / 2K",
            "measured": "holds in 500 draws",
            "verdict": "reproduced",
            "erratum": "",
        },
    ]
    rules = {
        "title": "rules",
        "headings": ["name", "terms", "state", "error"],
        "rows": [["shared rates", 8, 8, 0.0041]],
    }
    command = "vort reproduce --only kernel"
    made_by = {"command": command, "device": "cpu"}
    record = {"verdicts": claims, "sheets": [rules], "made_by": made_by, "command": command}
    write(kernel / "summary.json", record)
    return folder


def write(file: Path, content: Any) -> None:
    """JSON to a file."""
    file.write_text(json.dumps(content))
