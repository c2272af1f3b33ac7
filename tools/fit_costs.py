"""Fit the constants of `vort plan` to what benchmarks/model_gpu.py has measured on one GPU.

    python tools/fit_costs.py results/bench/model_gpu.json results/bench/retention_gpu.json

Reads the files, writes src/vort/lab/training/costs.json, and says how far off the fit is for every
run in the first. The second is of benchmarks/retention_gpu.py, and has what full attention takes,
of which the model has none. Run it whenever one of them changes.
"""

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from vort.lab.training.costs import GIB, WORKING, Costs, Shape, on_one  # noqa: E402

OUT = ROOT / "src" / "vort" / "lab" / "training" / "costs.json"
# The model of the benchmark, and the memory of its GPU.
SETTINGS = {
    "vocab_size": 32_000, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 2816, "output_gate": True, "num_scales": 8,
}  # fmt: skip
MEMORY = 141e9
# Of benchmarks/retention_gpu.py: heads times channels.
_CHANNELS = 1024


def runs(found: dict[str, Any]) -> dict[str, tuple[int, int, dict[str, Any]]]:
    """Training runs by name: tokens, of a sequence and in all, and what was measured."""
    chosen = {}
    for name, run in found.items():
        match = re.fullmatch(r"train (\d+)x(\d+)", name)
        if match and "ms" in run:
            chosen[name] = int(match[2]), int(match[1]) * int(match[2]), run
    return chosen


def attention(rows: list[dict[str, Any]]) -> float:
    """Seconds of PyTorch's attention for each token, position of its past, head and channel."""
    found = [
        row["both_ms"] / 1e3 / (row["batch"] * row["length"] * row["length"] / 2 * _CHANNELS)
        for row in rows
        if row["method"] == "sdpa" and row["head_size"] == 64 and "both_ms" in row
    ]
    return float(statistics.median(found))


def fit(found: dict[str, Any], rows: list[dict[str, Any]], made_by: dict[str, Any]) -> Costs:
    shape, measured = Shape.of(**SETTINGS), runs(found)
    length, detailed, parts = next(
        (length, tokens, run["parts_ms"])
        for length, tokens, run in measured.values()
        if "parts_ms" in run
    )
    units = shape.units(detailed, length)
    own = {"matrix products", "retention", "local attention", "loss"}
    stream = sum(ms for name, ms in parts.items() if name not in own)
    # What a layer keeps, from the slope between the two longest; the rest of the shorter is fixed.
    (few, low), *_, (many, high) = sorted(
        {tokens: run["peak_gib"] * GIB for _, tokens, run in measured.values()}.items()
    )[-2:]
    slope = (high - low) / (many - few) / shape.layers
    bare = Costs(1, 0, 0, 0, 0, 0, 0, 1, 0, 0, MEMORY, made_by)
    loss = shape.loss(few)
    kept = (slope - shape.kept(bare)[0]) / (2 * shape.width)
    costs = Costs(
        flops=units["matrix products"] / parts["matrix products"] * 1e3,
        retention=parts["retention"] / 1e3 / units["retention"],
        local=parts["local attention"] / 1e3 / units["local attention"],
        attention=attention(rows),
        stream=stream / 1e3 / units["stream"],
        loss=parts["loss"] / 1e3 / units["loss"],
        host=0.0,
        slack=1.0,
        kept=kept,
        fixed=max(low - WORKING * shape.parameters - few * slope * shape.layers - loss, 0.0),
        memory=MEMORY,
        made_by=made_by,
    )
    ratios = {
        name: run["ms"] / 1e3 / sum(shape.seconds(tokens, length, costs).values())
        for name, (length, tokens, run) in measured.items()
    }
    # Steps that the GPU is busy with, and steps in which it waits for the host.
    slack = statistics.median(x for x in ratios.values() if x < 2)
    waiting = [measured[name][2]["ms"] / 1e3 for name, x in ratios.items() if x >= 2]
    host = statistics.mean(waiting) / shape.layers
    return Costs(**{**vars(costs), "slack": slack, "host": host})


def main() -> None:
    source, other = Path(sys.argv[1]), Path(sys.argv[2])
    document, peers = json.loads(source.read_text()), json.loads(other.read_text())
    made_by = {key: document["made_by"][key] for key in ("device", "commit", "torch", "triton")}
    commit = peers.get("made_by", peers)["commit"]  # older files have it beside the rows
    made_by |= {"file": source.name, "attention": f"{other.name} at {commit}"}
    costs = fit(document["vort"], peers["rows"], made_by)
    OUT.write_text(json.dumps(vars(costs), indent=1) + "\n")
    shape = Shape.of(**SETTINGS)
    for name, (length, tokens, run) in runs(document["vort"]).items():
        memory, seconds = on_one(shape, tokens, length, costs)
        print(
            f"{name:16} memory {memory / GIB:7.2f} GiB, measured {run['peak_gib']:7.2f} "
            f"({memory / GIB / run['peak_gib'] - 1:+.1%}); time {seconds * 1e3:7.1f} ms, measured "
            f"{run['ms']:7.1f} ({seconds * 1e3 / run['ms'] - 1:+.1%})"
        )


if __name__ == "__main__":
    main()
