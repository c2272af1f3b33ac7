"""Section complexity: time and memory of a layer against length, and against softmax attention."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from math import isnan, log, nan
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from vort.lab.experiments.cell import Cell, Size
from vort.lab.experiments.experiment import Experiment, Figure, Record, Summary
from vort.lab.experiments.scores import by_row
from vort.lab.processes import processes, threads_alone
from vort.lab.report.tables import Sheet
from vort.lab.training.metrics import Interval
from vort.lab.verdicts import Claim, judge_power

__all__ = ["COMPLEXITY", "cost_of_layer"]

_LENGTHS: dict[Size, tuple[int, ...]] = {
    "laptop": (1024, 2048, 4096, 8192, 16384),
    "paper": (2048, 4096, 8192, 16384, 32768, 65536, 131_072, 262_144, 524_288),
}
_LAYER: dict[Size, dict[str, Any]] = {
    "laptop": {"hidden_size": 128, "num_attention_heads": 4, "num_scales": 8},
    "paper": {"hidden_size": 1024, "num_attention_heads": 16, "num_scales": 8},
}
# Lengths from which on a power is fitted: below them fixed costs hide it, on a GPU its host's.
_FITTED: dict[Size, int] = {"laptop": 2048, "paper": 32768}
_BARE = {"sliding_window": 0, "use_entropy": False, "conv_size": 0, "rope_theta": None}
_MODELS: dict[str, dict[str, Any]] = {
    "vort": {},
    "exponential": {"memory": "exponential"},
    "softmax": {"memory": "softmax"},
}
LABELS = {"vort": "VORT", "exponential": "one rate", "softmax": "softmax attention"}


def cells(size: Size, data: Path | None = None) -> list[Cell]:
    """One for each model and length, short ones first."""
    return [
        Cell(
            experiment="complexity",
            size=size,
            model=model,
            seed=0,
            config={**_LAYER[size], **_BARE, "horizon": 8192, **settings},
            training={"length": length, "batch": 1, "repeats": 3},
            tags={"length": length},
        )
        for length in _LENGTHS[size]
        for model, settings in _MODELS.items()
    ]


def _label(row: str) -> str:
    model, bracket, changes = row.partition(" [")
    return LABELS[model] + bracket + changes


def summarise(records: Sequence[Record], size: Size) -> Summary:
    """A table by length, how time grows, and where the layer overtakes attention."""
    found = {row: {r["length"]: r for r in members} for row, members in by_row(records).items()}
    shown = [*_MODELS, *(row for row in found if row not in _MODELS)]
    lengths = sorted({r["length"] for r in records})
    rows = []
    for length in lengths:
        row = [f"{length:,}"]
        for model in shown:
            one = found.get(model, {}).get(length)
            if one is None:
                row += ["–", "–"]
            else:
                row += [
                    f"{1e3 * one['times']['forward_backward']:.1f}",
                    f"{one['peak_bytes'] / 2**20:,.0f}",
                ]
        rows.append(row)
    headings = ["length", *(f"{_label(m)} ({unit})" for m in shown for unit in ("ms", "MiB"))]
    sheet = Sheet("One layer, forward and backward, batch 1", headings, rows)

    def draw(path: Path) -> None:
        from vort.lab.report.figures.results import draw_cost

        draw_cost(path, {_label(m): list(found[m].values()) for m in found})

    figures = [Figure("cost.png", "Time and peak memory of one layer by length.", draw)]
    notes = []
    if size == "paper" and rows:
        notes.append(
            f"The exponent is of lengths from {_FITTED[size]:,} on: below them a host takes longer "
            "to launch the layers than the GPU to compute them. That was chosen when lengths up to "
            "65,536 had been timed."
        )
    claims = _claims(found, _FITTED[size])
    return Summary([sheet], claims, figures if rows else [], notes)


def _claims(found: Mapping[str, Mapping[int, Record]], fitted: int) -> list[Claim]:
    ours, theirs = found.get("vort", {}), found.get("softmax", {})
    shared = sorted(set(ours) & set(theirs))
    if len(shared) < 2:
        return []

    def time(side: Mapping[int, Record], length: int) -> float:
        value: float = side[length]["times"]["forward_backward"]
        return value

    late = [n for n in shared if n >= fitted]
    lengths = late if len(late) > 1 else shared
    ours_power, their_power = (
        _exponent({n: time(side, n) for n in lengths}) for side in (ours, theirs)
    )
    faster = [n for n in shared if time(ours, n) < time(theirs, n)]
    where = f"from {faster[0]:,} positions on" if faster else f"not up to {shared[-1]:,} positions"
    return [
        Claim(
            "section complexity",
            "time is linear in length, attention's is quadratic",
            f"from {lengths[0]:,} to {lengths[-1]:,} it grows as "
            f"n^{_shown(ours_power)}, attention's as n^{_shown(their_power)}",
            judge_power(ours_power),
        ),
        Claim(
            "section complexity",
            "the break-even with attention is at about 19 positions, in operations",
            f"in time, the layer overtakes fused attention {where}",
            # Where it is ahead from the first length on, shorter ones were not asked.
            "undecided" if shared[0] in faster else "not reproduced",
            "E19",
        ),
    ]


def _exponent(times: Mapping[int, float]) -> Interval:
    """The exponent of time in length, by least squares in the logarithms, with its interval.

    Its `count` is of lengths.
    """
    lengths = list(times)
    if len(lengths) < 3:
        low, high = min(lengths), max(lengths)
        return Interval(log(times[high] / times[low]) / log(high / low), nan, len(lengths))
    from scipy.stats import linregress, t

    fit = linregress([log(n) for n in lengths], [log(times[n]) for n in lengths])
    half = float(t.ppf(0.975, len(lengths) - 2)) * float(fit.stderr)
    return Interval(float(fit.slope), half, len(lengths))


def _shown(power: Interval) -> str:
    return f"{power.mean:.2f}" if isnan(power.half) else f"({power.mean:.2f} ± {power.half:.2f})"


def cost_of_layer(config: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds and peak bytes of one attention layer at one length, forward and with backward.

    In a process of its own: the peak of a process counts from its start. `settings`: length, batch,
    repeats. Bytes are those of the device; on a CPU, what the process grew by, read on Linux only.
    """
    # To load a layer takes longer than to time most.
    context, quick = processes(("vort.layers", __name__))
    answers, there = context.Pipe(duplex=False)
    # A process that is forked has been told of one core: it may have those that are idle.
    threads = threads_alone() if quick else None
    process = context.Process(target=_cost, args=(there, dict(config), dict(settings), threads))
    process.start()
    there.close()
    try:
        found: dict[str, Any] | str = answers.recv()
    except EOFError:
        found = "its process died (out of memory?)"
    finally:
        answers.close()
        process.kill()
        process.join()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def _cost(
    answers: Any, config: dict[str, Any], settings: dict[str, Any], threads: int | None
) -> None:
    """Send the measurement, or what went wrong: what `cost_of_layer` starts."""
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        answers.send(_measured(config, **settings))
    except Exception as problem:
        answers.send(f"{type(problem).__name__}: {problem}")


def _measured(config: dict[str, Any], *, length: int, batch: int, repeats: int) -> dict[str, Any]:
    # Of the layer alone: a model's packages would take longer to load than most layers to time.
    from vort.layers import VortAttention

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    # As when the table was begun: no output gate unless a cell says so.
    layer = VortAttention(**{"output_gate": False, **config}).to(device)
    x = torch.randn(batch, length, config["hidden_size"], device=device, requires_grad=True)

    def forward() -> Tensor:
        with torch.autocast(device.type, dtype, enabled=device.type == "cuda"):
            result: Tensor = layer(x)[0]
        return result

    def both() -> None:
        forward().float().square().mean().backward()

    def infer() -> None:
        with torch.no_grad():
            forward()

    infer()
    before = _memory(device, reset=True)
    both()
    peak = _memory(device) - before
    times = {"forward": _median(infer, repeats, device)}
    times["forward_backward"] = _median(both, repeats, device)
    return {"length": length, "batch": batch, "times": times, "peak_bytes": peak}


def _median(call: Callable[[], None], repeats: int, device: torch.device) -> float:
    """Median seconds of a call, after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        began = perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(perf_counter() - began)
    return statistics.median(times[1:])


def _memory(device: torch.device, *, reset: bool = False) -> int:
    """Bytes at most so far; with `reset`, bytes now."""
    if device.type == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        return torch.cuda.max_memory_allocated()
    which = "VmRSS:" if reset else "VmHWM:"
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(which))


COMPLEXITY = Experiment(
    name="complexity",
    title="Complexity: time and memory by length",
    about="One layer of each kind, the same projections, forward and backward at batch 1, median "
    "of three after a warm-up, each in a process of its own.",
    cells=cells,
    summarise=summarise,
    measure=lambda cell: cost_of_layer(cell.config, cell.training),
    alone=True,
)
