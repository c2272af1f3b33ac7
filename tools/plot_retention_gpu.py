"""Draw docs/assets/retention_gpu.png from results/bench/retention_gpu.json.

python tools/plot_retention_gpu.py
"""

import json
from pathlib import Path
from typing import Any

from vort.lab.report.figures.style import BLUE, GREY, ORANGE, figure

ROOT = Path(__file__).parents[1]
# Batch, length and head size of the panels with bars.
SHAPES = [(4, 8_192, 64), (1, 131_072, 64)]
# Head size and methods of the panel that shows growth with length.
HEAD_SIZE = 64
GROWTH = {
    "sdpa": (GREY, "-"),
    "fla chunk_retention": (GREY, "--"),
    "vort S=8": (BLUE, "-"),
    "vort S=1": (BLUE, "--"),
    "local fused": (ORANGE, "-"),
}

Row = dict[str, Any]


def main() -> None:
    record = json.loads((ROOT / "results" / "bench" / "retention_gpu.json").read_text())
    device = record.get("made_by", record)["device"]  # older files have it beside the rows
    timed = [row for row in record["rows"] if "both_ms" in row]
    target = ROOT / "docs" / "assets" / "retention_gpu.png"
    growth = _growth_rows(timed)
    panels = len(SHAPES) + bool(growth)
    with figure(target, panels, 5.1 * panels, 3.9) as axes:
        for axis, shape in zip(axes, SHAPES, strict=False):
            rows = [r for r in timed if (r["batch"], r["length"], r["head_size"]) == shape]
            _bars(axis, sorted(rows, key=lambda row: -row["both_ms"]), shape, device)
        if growth:
            _growth(axes[-1], growth)
    print(target.relative_to(ROOT))


def _bars(axis: Any, rows: list[Row], shape: tuple[int, int, int], device: str) -> None:
    names = [row["method"] for row in rows]
    colours = [BLUE if name.startswith(("vort", "local fused")) else GREY for name in names]
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
        title=f"B, T, D = {batch}, {length:,}, {size}; {device}, bf16",
    )


def _growth_rows(timed: list[Row]) -> list[Row]:
    """Rows of several lengths and one number of tokens; none where lengths differ in tokens too."""
    rows = [row for row in timed if row["head_size"] == HEAD_SIZE and row["method"] in GROWTH]
    counts = [row["batch"] * row["length"] for row in rows]
    most = max(set(counts), key=counts.count)
    rows = [row for row, count in zip(rows, counts, strict=True) if count == most]
    return rows if len({row["length"] for row in rows}) > 1 else []


def _growth(axis: Any, rows: list[Row]) -> None:
    """Time of a token by length."""
    tokens = rows[0]["batch"] * rows[0]["length"]
    for method, (colour, style) in GROWTH.items():
        points = sorted(
            (row["length"], row["both_ms"] / tokens * 1e6)
            for row in rows
            if row["method"] == method
        )
        if points:
            axis.plot(*zip(*points, strict=True), style, color=colour, marker="o", label=method)
    axis.set(xscale="log", yscale="log", xlabel="T")
    lengths = sorted({row["length"] for row in rows})
    axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axis.minorticks_off()
    axis.legend(fontsize=8)
    axis.set_title(f"ns per token, forward + backward; {tokens:,} tokens")


if __name__ == "__main__":
    main()
