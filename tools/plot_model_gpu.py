"""Draw docs/assets/model_gpu.png from results/bench/model_gpu.json: whole models on one GPU.

python tools/plot_model_gpu.py
"""

import json
from pathlib import Path
from typing import Any

from vort.lab.report.figures.style import BLUE, GREY, ORANGE, figure

ROOT = Path(__file__).parents[1]
MODELS = {
    "vort": ("VORT, S = 8", BLUE),
    "retnet": ("RetNet", ORANGE),
    "llama": ("Llama, SDPA", GREY),
}
TRAINING = {
    "train 16x2048": "16 x 2,048",
    "train 4x8192": "4 x 8,192",
    "train 1x32768": "1 x 32,768",
    "train 1x131072": "1 x 131,072",
}
# A star: of an earlier run.
DECODING = [
    ("VORT, after 1,000 tokens", "vort", "decode 1x1000", BLUE),
    ("VORT, after 65,536", "vort", "decode 1x65536", BLUE),
    ("VORT, after 1,000,000", "vort", "decode 1x1000000", BLUE),
    ("Llama, static cache, after 1,000", "llama", "decode static 1x1000", GREY),
    ("Llama, dynamic, after 1,000", "llama", "decode 1x1000", GREY),
    ("RetNet, after 1,000", "retnet", "decode 1x1000", ORANGE),
    ("VORT, batch 16, after 1,000", "vort", "decode 16x1000", BLUE),
    ("Llama, dynamic, batch 16, after 1,000", "llama", "decode 16x1000", GREY),
    ("RetNet, batch 16, after 1,000", "retnet", "decode 16x1000", ORANGE),
]


def main() -> None:
    record: dict[str, Any] = json.loads((ROOT / "results/bench/model_gpu.json").read_text())
    target = ROOT / "docs" / "assets" / "model_gpu.png"
    with figure(target, 2, 12, 4.2) as (training, decoding):
        _training(training, record)
        _decoding(decoding, record)
    print(target.relative_to(ROOT))


def _training(axis: Any, record: dict[str, Any]) -> None:
    width = 0.8 / len(MODELS)
    for number, (name, (label, color)) in enumerate(MODELS.items()):
        found = {
            place: record[name][row]
            for place, row in enumerate(TRAINING)
            # Those that fitted into memory.
            if "tokens_per_second" in record[name].get(row, {})
        }
        places = [place + (number - (len(MODELS) - 1) / 2) * width for place in found]
        heights = [row["tokens_per_second"] / 1e3 for row in found.values()]
        earlier = ["run" in row for row in found.values()]
        bars = axis.bar(places, heights, width, color=color, label=label + " *" * all(earlier))
        marks = [f"{x:.0f}" + "*" * old for x, old in zip(heights, earlier, strict=True)]
        axis.bar_label(bars, marks, fontsize=7, padding=1)
    axis.set_xticks(range(len(TRAINING)), TRAINING.values())
    axis.set(ylabel="thousand tokens a second")
    axis.set_ylim(0, 1.3 * axis.get_ylim()[1])
    axis.set_title(f"training, 24 layers of 1,024, bf16, {record['made_by']['device']}")
    axis.legend(ncols=2, loc="upper left", fontsize=8)


def _decoding(axis: Any, record: dict[str, Any]) -> None:
    rows = [
        (f"{label} *" if "run" in record[model][key] else label, model, key, color)
        for label, model, key, color in DECODING
        if key in record.get(model, {})
    ]
    times = [record[model][key]["ms"] for _, model, key, _ in rows]
    bars = axis.barh(range(len(rows)), times, color=[color for *_, color in rows])
    axis.bar_label(bars, fmt="%.2g ms", fontsize=8, padding=2)
    axis.set_yticks(range(len(rows)), [label for label, *_ in rows])
    axis.invert_yaxis()
    axis.set(xlabel="milliseconds a token (*: of an earlier run)", xscale="log")
    axis.set_xlim(1, 2 * max(times))
    axis.set_title("decoding through generate, greedy")


if __name__ == "__main__":
    main()
