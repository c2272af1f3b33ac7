"""VORT's retention and local attention on a GPU against what one would use instead.

    python benchmarks/retention_gpu.py --out retention_gpu.json [--with FOLDER] [--quick] [--resume]
    python benchmarks/retention_gpu.py --compile [--with FOLDER] [--quick]

Prints a table and writes one JSON, row by row, the most wanted first: a run cut short keeps what it
measured, and `--resume` goes on from it, shape by shape, so that methods compared with each other
are timed in one run. `--with` names a folder that holds packages to compare with
(flash-linear-attention, unpacked); without it they are looked for as installed, and the table says
which are missing.
`--quick` runs the two shapes that have targets and what they are compared with. `--compile` fills
the cache of compiled kernels and times nothing, so it may run beside other work. The other
packages' kernels choose among all their own configurations.

Times are medians of CUDA-event timings, in milliseconds. VORT reads and writes with gates,
normaliser "decayed", gradients to q, k, v, write and read; local attention has a window of 128,
returns the entropy and sends gradients through it. SDPA is PyTorch's own choice of kernel; the full
table lists its flash kernel beside it.
"""

import argparse
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from vort.lab.report.provenance import provenance  # noqa: E402

HEADS_WIDTH = 1024  # heads times head size, the same for both head sizes
TOKENS = 131_072
SCALES = (1, 4, 8, 12, 16)
TARGETS = [(4, 8_192, 64), (1, TOKENS, 64)]
WINDOW = 128


def shapes(quick: bool) -> list[tuple[int, int, int]]:
    """(batch, length, head size) of every row: the targets, then constant tokens."""
    if quick:
        return TARGETS
    rest = [
        (TOKENS // length, length, size)
        for size in (64, 128)
        for length in (2_048, 8_192, 32_768, TOKENS)
    ]
    return TARGETS + [shape for shape in rest if shape not in TARGETS]


def make(batch: int, length: int, size: int, terms: int) -> tuple[dict[str, Tensor], Tensor]:
    """Random inputs with gradients, and the gradient that comes back."""
    heads = HEADS_WIDTH // size

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, device="cuda")

    shape = (batch, length, heads)
    inputs = {
        "q": rand(*shape, size).bfloat16(),
        "k": rand(*shape, size).bfloat16(),
        "v": torch.randn(*shape, size, device="cuda").bfloat16(),
        "write": rand(*shape, terms),
        "read": rand(*shape, terms),
    }
    for x in inputs.values():
        x.requires_grad_()
    return inputs, torch.randn(*shape, size, device="cuda").bfloat16()


def vort(inputs: dict[str, Tensor]) -> Tensor:
    from vort.ops.retention import retention

    q, k, v, write, read = (inputs[name] for name in ("q", "k", "v", "write", "read"))
    return retention(q, k, v, write, decays(write.shape[-1]), read=read, backend="triton")[0]


@lru_cache
def decays(terms: int) -> Tensor:
    """Log decays of time scales from a tenth of a token to ten thousand."""
    return -torch.logspace(-4, 1, terms, device="cuda")


def sdpa(inputs: dict[str, Tensor]) -> Tensor:
    q, k, v = (inputs[name].transpose(1, 2) for name in "qkv")
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def sdpa_flash(inputs: dict[str, Tensor]) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return sdpa(inputs)


def fla_retention(inputs: dict[str, Tensor]) -> Tensor:
    from fla.ops.retention import chunk_retention

    return chunk_retention(inputs["q"], inputs["k"], inputs["v"])[0]


def fla_simple_gla(inputs: dict[str, Tensor]) -> Tensor:
    from fla.ops.simple_gla import chunk_simple_gla

    gate = -inputs["write"][..., 0].detach()
    return chunk_simple_gla(inputs["q"], inputs["k"], inputs["v"], g=gate)[0]


def fla_gla(inputs: dict[str, Tensor]) -> Tensor:
    from fla.ops.gla import chunk_gla

    gate = -inputs["k"].detach()
    return chunk_gla(inputs["q"], inputs["k"], inputs["v"], g=gate)[0]


def composed(inputs: dict[str, Tensor]) -> Tensor:
    """Eight time scales from eight single-decay calls."""
    from fla.ops.retention import chunk_retention

    q, k, v, write, read = (inputs[name] for name in ("q", "k", "v", "write", "read"))
    total = None
    for s in range(write.shape[-1]):
        part = chunk_retention(q, (k * write[..., s, None]).bfloat16(), v)[0] * read[..., s, None]
        total = part if total is None else total + part
    assert total is not None
    return total.bfloat16()


def local(inputs: dict[str, Tensor], backend: str) -> tuple[Tensor, Tensor]:
    from vort.ops.local_attention import local_attention

    q, k, v = (inputs[name] for name in "qkv")
    return local_attention(q, k, v, WINDOW, return_entropy=True, backend=backend)


def local_fused(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return local(inputs, "triton")


def local_block(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return local(inputs, "block")


Output = Tensor | tuple[Tensor, Tensor]
METHODS: dict[str, tuple[Callable[[dict[str, Tensor]], Output], int, tuple[str, ...]]] = {
    **{f"vort S={s}": (vort, s, ("q", "k", "v", "write", "read")) for s in SCALES},
    "sdpa": (sdpa, 1, ("q", "k", "v")),
    "sdpa flash": (sdpa_flash, 1, ("q", "k", "v")),
    "fla chunk_retention": (fla_retention, 1, ("q", "k", "v")),
    "fla chunk_simple_gla": (fla_simple_gla, 1, ("q", "k", "v")),
    "fla chunk_gla": (fla_gla, 1, ("q", "k", "v")),
    "8 x chunk_retention": (composed, 8, ("q", "k", "v", "write", "read")),
    "local fused": (local_fused, 1, ("q", "k", "v")),
    "local block form": (local_block, 1, ("q", "k", "v")),
}
# Ordered by what a run cut short should still have measured.
QUICK = [
    "vort S=8", "fla chunk_retention", "vort S=1", "local fused", "sdpa", "vort S=16",
    "fla chunk_simple_gla", "8 x chunk_retention", "local block form",
]  # fmt: skip
FULL = QUICK + [name for name in METHODS if name not in QUICK]
# Timed after everything else: it has the most configurations to compile.
LATE = ("fla chunk_gla",)
# Processes that compile an autotuned method's configurations.
SHARES = 12
# Seconds after which a row is given up; a method that compiles for longer would take the rest.
PATIENCE = 60
# Its backward refuses the Triton this is timed with (fla issue 640): only its forward is tried.
FORWARD_ONLY = ("fla chunk_simple_gla",)


def bench(run: Callable[[], Any]) -> float:
    """Median of CUDA-event times; long ones are repeated little."""
    run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    repeats = max(5, min(40, int(0.08 / max(seconds, 1e-5))))
    for _ in range(2 if seconds > 0.02 else 5):
        run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for first, last in events:
        first.record()
        run()
        last.record()
    torch.cuda.synchronize()
    times = sorted(first.elapsed_time(last) for first, last in events)
    return times[len(times) // 2]


def gradients(output: Output, wanted: list[Tensor], back: Tensor) -> tuple[Tensor, ...]:
    """Send `back` through an output, and one column of it through an entropy beside it."""
    if isinstance(output, tuple):
        return torch.autograd.grad(output, wanted, (back, back[..., 0].float()))
    return torch.autograd.grad(output, wanted, back)


def measure(name: str, batch: int, length: int, size: int) -> dict[str, Any]:
    """Forward, forward+backward and peak memory of one method at one shape."""
    function, terms, leaves = METHODS[name]
    row: dict[str, Any] = {"method": name, "batch": batch, "length": length, "head_size": size}
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(PATIENCE)
    try:
        inputs, back = make(batch, length, size, terms)
        wanted = [inputs[leaf] for leaf in leaves]

        def forward() -> None:
            with torch.no_grad():
                function(inputs)

        def both() -> None:
            gradients(function(inputs), wanted, back)

        begin = time.perf_counter()
        forward()
        torch.cuda.synchronize()
        row["first_call_s"] = time.perf_counter() - begin
        row["forward_ms"] = bench(forward)
        if name in FORWARD_ONLY:
            return row | {"note": "forward only"}
        both()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        both()
        torch.cuda.synchronize()
        row["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
        row["both_ms"] = bench(both)
    except ModuleNotFoundError as error:
        row["note"] = f"not installed: {error.name}"
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0][:160]
        row["note"] = f"refused: {type(error).__name__}: {reason}"
    finally:
        signal.alarm(0)
    return row


def _give_up(*_: Any) -> None:
    raise TimeoutError(f"more than {PATIENCE} s for one row")


def ceilings() -> dict[str, float]:
    """Measured copy bandwidth (bytes read plus written) and bf16 matrix rate."""
    x = torch.randn(2**29, device="cuda").view(torch.bfloat16)
    y = torch.empty_like(x)
    copy = bench(lambda: y.copy_(x))
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    product = bench(lambda: a @ b)
    return {"copy_gb_s": 2 * 2**31 / copy / 1e6, "matmul_tflop_s": 2 * 8192**3 / product / 1e9}


def floor(row: dict[str, Any], limits: dict[str, float]) -> dict[str, float]:
    """The least time VORT could take: inputs and outputs once, states built and read once.

    Backward reads and writes each tensor's gradient and builds and reads states both ways; that of
    local attention computes its scores again.
    """
    size = row["head_size"]
    rows = row["batch"] * row["length"] * HEADS_WIDTH // size
    if row["method"].startswith("local"):
        gates, work = 4, 4 * WINDOW * size
    else:
        terms = int(row["method"].split("=")[1])
        gates, work = 2 * terms * 4, 4 * terms * size * size + 4 * 64 * size
    moved = 4 * size * 2 + gates
    both_moved = moved + 8 * size * 2 + 2 * gates
    bandwidth, rate = limits["copy_gb_s"] * 1e6, limits["matmul_tflop_s"] * 1e9
    return {
        "forward_floor_ms": rows * max(moved / bandwidth, work / rate),
        "both_floor_ms": rows * max(both_moved / bandwidth, 3.5 * work / rate),
    }


def decode(limits: dict[str, float]) -> dict[str, Any]:
    """One token through 24 layers' worth of state in a CUDA graph."""
    from vort.ops.retention.state import RetentionState
    from vort.ops.retention.triton import retention_step_triton

    layers, batch, heads, size, terms = 24, 64, 16, 64, 8
    rates = -torch.logspace(-4, 1, terms, device="cuda")
    states = [
        RetentionState(
            torch.randn(batch, heads, terms, size, size, device="cuda"),
            torch.rand(batch, heads, terms, size, device="cuda"),
        )
        for _ in range(layers)
    ]
    q, k, v = (torch.rand(batch, heads, size, device="cuda").bfloat16() for _ in range(3))
    write, read = (torch.rand(batch, heads, terms, device="cuda") for _ in range(2))

    def token() -> None:
        for state in states:
            retention_step_triton(state, q, k, v, write, rates, read=read)

    token()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token()
    milliseconds = bench(graph.replay)
    moved = 2 * sum(x.numel() * 4 for state in states for x in state if x is not None)
    rate = moved / milliseconds / 1e6
    return {
        "layers": layers,
        "batch": batch,
        "token_ms": milliseconds,
        "gb_s": rate,
        "of_copy_bandwidth": rate / limits["copy_gb_s"],
    }


def shorten_autotuning(shard: int = 0, shards: int = 1) -> None:
    """Autotune with short timings, over every `shards`-th configuration only.

    What is compared with tries up to fifty configurations a kernel, compiled one by one, which
    would take many minutes. Processes that each compile a share of them fill the cache on disk;
    the timing run then tries them all. To be called before the kernels are imported.
    """
    from triton import testing
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.__init__

    def init(self: Any, fn: Any, names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        configs = list(configs)
        original(self, fn, names, configs[shard::shards] or configs[:1], *args, **kwargs)
        self._do_bench = lambda call, quantiles: testing.do_bench(
            call, warmup=2, rep=8 if shards == 1 else 1, quantiles=quantiles
        )

    Autotuner.__init__ = init


def warm(job: tuple[str, tuple[int, int, int], str | None, int, int]) -> None:
    """Compile one method's kernels in its own process; the cache on disk serves the timing run."""
    name, (batch, length, size), folder, shard, shards = job
    if folder:
        sys.path.insert(0, folder)
    shorten_autotuning(shard, shards)
    function, terms, leaves = METHODS[name]
    try:
        inputs, back = make(batch, length, size, terms)
        output = function(inputs)
        if name not in FORWARD_ONLY:
            gradients(output, [inputs[leaf] for leaf in leaves], back)
        torch.cuda.synchronize()
    except Exception:
        return  # the timing run meets it again and says why


def warm_jobs(names: list[str], size: int, folder: str | None) -> list[Any]:
    """Jobs for `warm` at one head size: autotuned methods in shares, what compiles nothing none."""
    jobs = []
    for name in names:
        if name.startswith("fla"):
            shape = (1, 8_192, size)
            jobs += [(name, shape, folder, shard, SHARES) for shard in range(SHARES)]
        elif name.startswith("vort"):
            # kernels know the number of segments: those of long sequences, and none
            cuts = [(1, 32_768), (4, 32_768), (16, 2_048)]
            jobs += [(name, (*cut, size), folder, 0, 1) for cut in cuts]
        elif name == "local fused":
            jobs.append((name, (1, 8_192, size), folder, 0, 1))
    return jobs


def compile_all(names: list[str], size: int, folder: str | None, workers: int) -> float:
    """Fill the cache of compiled kernels for one head size; seconds it took."""
    begin = time.perf_counter()
    # a process for each job: what it patches must not reach the next
    with ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        list(pool.map(warm, warm_jobs(names, size, folder)))
    return time.perf_counter() - begin


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text, ratios to chunk_retention at the same shape."""
    head = (
        f"{'B,T,D':>16} {'method':<22} {'fwd':>8} {'fwd+bwd':>8} {'peak MiB':>9} {'floor':>13} "
        f"{'vs retention':>13}"
    )
    return "\n".join([head, *(line(row, rows) for row in rows)])


def line(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """One row as text."""
    shape = shape_of(row)
    head = f"{','.join(map(str, shape)):>16} {row['method']:<22}"
    fields = [
        f"{row[key]:>8.3f}" if key in row else f"{'-':>8}" for key in ("forward_ms", "both_ms")
    ]
    fields.append(f"{row['peak_mib']:>9.0f}" if "peak_mib" in row else f"{'-':>9}")
    floors = "/".join(f"{row[k]:.2f}" for k in ("forward_floor_ms", "both_floor_ms") if k in row)
    base = next(
        (r for r in rows if r["method"] == "fla chunk_retention" and shape_of(r) == shape),
        {},
    )
    ratios = "/".join(
        f"{row[key] / base[key]:.2f}"
        for key in ("forward_ms", "both_ms")
        if key in row and key in base
    )
    return f"{head} {' '.join(fields)} {floors:>13} {ratios:>13} {row.get('note', '')}"


def about() -> dict[str, Any]:
    """Where the figures come from."""
    import triton

    found = {
        **provenance(),
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "autotuning": "of other packages' kernels: every configuration, 8 ms a trial",
    }
    try:
        import fla
    except ImportError:
        return found | {"flash-linear-attention": "not installed"}
    return found | {"flash-linear-attention": fla.__version__}


def done(rows: list[dict[str, Any]], shape: tuple[int, int, int], names: list[str]) -> bool:
    """Whether every one of these methods has a row at this shape."""
    return {r["method"] for r in rows if shape_of(r) == shape} >= set(names)


def shape_of(row: dict[str, Any]) -> tuple[int, int, int]:
    return row["batch"], row["length"], row["head_size"]


def finished_rows(
    before: dict[str, Any], now: dict[str, Any], phases: tuple[list[str], ...]
) -> list[dict[str, Any]]:
    """Rows of an earlier run whose shape it finished, phase by phase."""
    former, current = before.get("made_by", {}), now["made_by"]
    for key in ("device", "code", "torch", "triton", "flash-linear-attention", "autotuning"):
        if former.get(key) != current[key]:
            sys.exit(f"cannot resume: {key} was {former.get(key)!r}, is {current[key]!r}")
    now["compile_s"] |= before["compile_s"]
    rows = [row for row in before["rows"] if "TimeoutError" not in row.get("note", "")]
    return [
        row
        for row in rows
        if any(row["method"] in names and done(rows, shape_of(row), names) for names in phases)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--with", dest="folder", help="folder of packages to compare with")
    parser.add_argument("--quick", action="store_true", help="only the shapes that have targets")
    parser.add_argument("--methods", nargs="*", choices=list(METHODS))
    parser.add_argument("--resume", action="store_true", help="keep the shapes that --out has")
    parser.add_argument("--compile", action="store_true", help="compile all kernels, time none")
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    if arguments.folder:
        sys.path.insert(0, arguments.folder)
    quick = arguments.quick
    shorten_autotuning()
    names = arguments.methods or (QUICK if quick else FULL)
    cut = shapes(quick)
    early, late = ([n for n in names if (n in LATE) == is_late] for is_late in (False, True))
    result = {"made_by": about(), "rows_wanted": len(cut) * len(names), "compile_s": {}}
    rows: list[dict[str, Any]] = []
    if arguments.resume and arguments.out and arguments.out.exists():
        rows = finished_rows(json.loads(arguments.out.read_text()), result, (early, late))
    result["rows"] = rows

    def save() -> None:
        if arguments.out:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(result, indent=1))

    sizes = list(dict.fromkeys(size for _, _, size in cut))
    if arguments.compile:
        for phase, size in itertools.product((early, late), sizes):
            seconds = compile_all(phase, size, arguments.folder, arguments.workers)
            print(f"head size {size}: {len(phase)} methods in {seconds:.0f} s", flush=True)
        return
    limits: dict[str, float] = {}
    for phase in (early, late):
        for size in sizes if phase else ():
            missing = [s for s in cut if s[2] == size and not done(rows, s, phase)]
            if not missing:
                continue
            seconds = compile_all(phase, size, arguments.folder, arguments.workers)
            result["compile_s"][f"{size}{' late' if phase is late else ''}"] = seconds
            print(f"head size {size}: compiled in {seconds:.0f} s", flush=True)
            if not limits:
                result["ceilings"] = limits = ceilings()
                result["decode"] = decode(limits)
                print(json.dumps({k: v for k, v in result.items() if k != "rows"}), flush=True)
            for batch, length, _ in missing:
                for name in phase:
                    row = measure(name, batch, length, size)
                    if name.startswith(("vort", "local")):
                        row |= floor(row, limits)
                    rows.append(row)
                    torch.cuda.empty_cache()
                    save()
                    print(line(row, rows), flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
