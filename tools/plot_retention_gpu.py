"""Draw docs/assets/retention_gpu.png from results/bench/retention_gpu.json.

python tools/plot_retention_gpu.py
"""

import json
from pathlib import Path
from typing import Any

from vort.report.style import BLUE, GREY, ORANGE, figure

ROOT = Path(__file__).parents[1]


def main() -> None:
    record = json.loads((ROOT / "results" / "bench" / "retention_gpu.json").read_text())
    timed = [row for row in record["rows"] if "both_ms" in row]
    shapes = sorted(
        {(row["batch"], row["length"], row["head_size"]) for row in timed}, reverse=True
    )
    target = ROOT / "docs" / "assets" / "retention_gpu.png"
    with figure(target, len(shapes), 4.9 * len(shapes), 3.4) as axes:
        for axis, shape in zip(axes, shapes, strict=True):
            rows = [r for r in timed if (r["batch"], r["length"], r["head_size"]) == shape]
            _bars(axis, sorted(rows, key=lambda row: -row["both_ms"]), shape, record)
    print(target.relative_to(ROOT))


def _bars(axis: Any, rows: list[dict[str, Any]], shape: tuple[int, int, int], record: Any) -> None:
    names = [row["method"] for row in rows]
    colours = [BLUE if name.startswith("vort") else GREY for name in names]
    axis.barh(names, [row["both_ms"] for row in rows], color=colours, height=0.6)
    axis.barh(names, [row["forward_ms"] for row in rows], color=ORANGE, height=0.25)
    for place, row in enumerate(rows):
        label = f" {row['forward_ms']:.3g} / {row['both_ms']:.3g}"
        axis.text(row["both_ms"], place, label, va="center", fontsize=8)
    axis.set_xscale("log")
    axis.set_xlim(right=axis.get_xlim()[1] * 4)
    axis.grid(visible=False, axis="y")
    batch, length, size = shape
    axis.set(
        xlabel="ms: forward (orange) / forward + backward",
        title=f"B, T, D = {batch}, {length:,}, {size}; {record['device']}, bf16",
    )


if __name__ == "__main__":
    main()
