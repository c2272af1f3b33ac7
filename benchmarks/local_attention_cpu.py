"""Local attention on a CPU against full causal SDPA and SDPA under a dense band mask.

    python benchmarks/local_attention_cpu.py --threads 1

Contenders are timed in turn, round after round, and the best round of each counts, so that the
ratios hold even on a machine that others use.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from vort.lab.report.provenance import provenance
from vort.ops.local_attention import (
    LocalState,
    attend_locally,
    local_attention,
)

HEADS, DIM = 4, 64


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


def contenders(length: int, window: int) -> dict[str, Callable[..., Tensor]]:
    lag = torch.arange(length)[:, None] - torch.arange(length)
    band = (lag >= 0) & (lag < window)

    def with_entropy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o, entropy = local_attention(q, k, v, window, return_entropy=True)
        assert entropy is not None
        return o.sum() + entropy.sum()

    return {
        "local": lambda q, k, v: local_attention(q, k, v, window)[0].sum(),
        "local_with_entropy": with_entropy,
        "sdpa_causal": lambda q, k, v: sdpa(q, k, v, None).sum(),
        "sdpa_band": lambda q, k, v: sdpa(q, k, v, band).sum(),
    }


def seconds(function: Callable[..., Tensor], leaves: list[Tensor], backward: bool) -> float:
    begin = time.perf_counter()
    if backward:
        torch.autograd.grad(function(*leaves), leaves)
    else:
        with torch.no_grad():
            function(*leaves)
    return time.perf_counter() - begin


def compare(length: int, window: int, rounds: int) -> dict[str, object]:
    leaves = [torch.randn(1, length, HEADS, DIM, requires_grad=True) for _ in range(3)]
    functions = contenders(length, window)
    result: dict[str, object] = {"length": length, "window": window}
    for name, backward in (("forward", False), ("forward_backward", True)):
        times: dict[str, list[float]] = {key: [] for key in functions}
        for _ in range(rounds + 1):
            for key, function in functions.items():
                times[key].append(seconds(function, leaves, backward))
        best = {key: min(values[1:]) for key, values in times.items()}
        result[name + "_ms"] = {key: round(1e3 * value, 2) for key, value in best.items()}
        for rival in ("sdpa_causal", "sdpa_band"):
            ratios = {
                key: round(best[key] / best[rival], 4) for key in ("local", "local_with_entropy")
            }
            result[f"{name}_ratio_to_{rival}"] = ratios
    return result


def step_milliseconds(window: int, steps: int = 300) -> float:
    x = torch.randn(1, 1, HEADS, DIM)
    state = LocalState.empty(x, x, window)
    options = {"rope_base": 1e4, "return_entropy": True, "output_state": True}
    times = []
    with torch.no_grad():
        for _ in range(steps):
            begin = time.perf_counter()
            _, _, state = attend_locally(x, x, x, window, state=state, **options)
            times.append(time.perf_counter() - begin)
    return round(1e3 * statistics.median(times), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--windows", type=int, nargs="+", default=[64, 128, 512])
    parser.add_argument("--out", type=Path, default=Path("results/bench/local_attention_cpu.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rows = []
    for length in args.lengths:
        for window in args.windows:
            rows.append(compare(length, window, args.rounds))
            print(json.dumps(rows[-1]), flush=True)
    report = {
        "made_by": {
            **provenance(),
            "device": platform.processor() or platform.machine(),
            "threads": args.threads,
        },
        "setting": {"batch": 1, "heads": HEADS, "dim": DIM, "dtype": "float32"},
        "rows": rows,
        "step_ms": {str(window): step_milliseconds(window) for window in args.windows},
    }
    print("one step, ms:", report["step_ms"])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
