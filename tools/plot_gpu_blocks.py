"""Draw docs/assets/gpu_blocks.png: which kernel makes which weight of one head, and how.

python tools/plot_gpu_blocks.py
"""

from pathlib import Path

import numpy as np
import torch

from vort.fractional import PowerLawBasis
from vort.lab.report.figures.style import BLUE, GREY, ORANGE, figure
from vort.ops.retention.triton.tiles import MEMORY
from vort.ops.retention.triton.tiling import choose_tiling

ROOT = Path(__file__).parents[1]
SPANS, TERMS, HORIZON = 3, 8, 10_000


def main() -> None:
    from matplotlib.patches import Rectangle

    tiling = choose_tiling(64, 64, TERMS, torch.bfloat16, None)
    span, rows = tiling.span, tiling.rows
    length = SPANS * span
    target = ROOT / "docs" / "assets" / "gpu_blocks.png"
    rates = PowerLawBasis.fit(HORIZON, TERMS).rates
    with figure(target, 2, 11, 4.6) as (matrix, modes):
        for t in range(0, length, rows):
            first = t // span * span
            matrix.add_patch(Rectangle((0, t), first, rows, color=BLUE, alpha=0.25, lw=0))
            for i in range(first, t + rows, rows):
                own = i == t
                face = {"facecolor": ORANGE, "alpha": 0.85 if own else 0.4, "edgecolor": "white"}
                if own:
                    corners = [(i, t), (i, t + rows), (i + rows, t + rows)]
                    matrix.fill(*zip(*corners, strict=True), **face)
                else:
                    matrix.add_patch(Rectangle((i, t), rows, rows, **face))
        for edge in range(span, length, span):
            matrix.axvline(edge, color=GREY, lw=1, ls=":")
            matrix.annotate(
                "states", (edge, edge), (edge + 12, edge - 30), color=GREY, fontsize=8
            )  # fmt: skip
        matrix.set(xlim=(0, length), ylim=(length, 0), aspect="equal")
        matrix.set(xlabel="token that writes", ylabel="token that reads")
        matrix.set_xticks(range(0, length + 1, span))
        matrix.set_yticks(range(0, length + 1, span))
        matrix.set_title("blue: through states; orange: within a span")

        lag = np.arange(span)
        for s, rate in enumerate(rates):
            bits = -rate * lag / np.log(2)
            kept = bits > -MEMORY.value
            modes.plot(lag[kept], np.full(kept.sum(), s), color=BLUE, lw=6, solid_capstyle="butt")
            label = "for ever" if rate == 0 else f"{1 / rate:,.{0 if rate < 0.1 else 1}f} tokens"
            modes.annotate(label, (span + 6, s), va="center", fontsize=8, annotation_clip=False)
        for block in range(0, span, rows):
            live = sum(block == 0 or rate * block / np.log(2) < MEMORY.value for rate in rates)
            modes.axvline(block, color=GREY, lw=1, ls=":")
            modes.annotate(
                f"{live} read", (block + rows / 2, -0.75), ha="center", fontsize=8, color=GREY
            )  # fmt: skip
        modes.set(xlim=(0, span), ylim=(TERMS - 0.4, -1.1), xlabel="tokens into the span")
        modes.set_xticks(range(0, span + 1, rows))
        modes.set_yticks(range(TERMS))
        modes.set_ylabel("time scale")
        modes.set_title(f"how long a state matters ({TERMS} rates, horizon {HORIZON:,})")
    print(target.relative_to(ROOT))


if __name__ == "__main__":
    main()
