"""Whole language models on one GPU: a training step, prefill and decoding, VORT beside its peers.

    python benchmarks/model_gpu.py --out model_gpu.json [--with FOLDER] [--models vort,llama]
    python benchmarks/model_gpu.py --resume --out model_gpu.json [--models gla --only 'train|step']
    python benchmarks/model_gpu.py --merge other.json --out model_gpu.json

24 layers of 1,024, 16 heads, vocabulary 32,000, bf16 weights, random tokens. VORT has 8 scales and
the default options of a language model with an output gate (`vort_s12`: 12 scales, `vort_w4`: a
window in every fourth layer alone); Llama is Hugging Face's with SDPA; RetNet and GLA are
flash-linear-attention's models with their own defaults, found in the folder that `--with` names or
as installed. Every model runs in a process of its own, so that none finds the kernels of another
compiled or its memory in use. A run cut short keeps what it measured; `--resume` goes on with what
is missing, or with those of it that `--models` and `--only` name. `--merge` takes rows that are
missing from a file of another run, and needs no GPU. `made_by` says where rows come from; those of
later runs have a `run`, a number in the list `runs`. Compare rows of one run.

Training: forward and backward of the loss of labels, PyTorch eager unless the name ends in
`+compile`, or in `+recorded`: the step as a CUDA graph (`vort.models.RecordedStep`, which takes any
model); `+autocast`: weights in float32, the forward under autocast to bfloat16. Medians in
milliseconds, peak memory, launches and kernel time by part. Before any row a model takes one step
of 4 x 8,192 in which it compiles and chooses its kernels (`tuning_s`): those that tune do so on a
batch that fills the GPU, however long that takes. `first_s`: a row's first step. 1 x 256 tokens is
the host's time: the GPU waits.
`train padded`: rows of an eighth of the length up to all of it, padded on the right; `share` of
the tokens is text.
Prefill: logits of the last token, with the cache after it.
Decoding: `generate`, greedy, milliseconds a token between the 8th and the last; of VORT also the
recorded step by itself (`step`: its replay, without what `generate` does around it), both with
states in bfloat16, and `decode in turns`: texts after prompts of all lengths one after another,
five times, since what a clock or a host does between two rows is more than what a length does;
`later_ms` are medians of the last tokens of longer texts, when reading the prompt has long ended.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402

from vort.lab.report.provenance import provenance  # noqa: E402

LAYERS, WIDTH, HEADS, VOCABULARY, MLP = 24, 1024, 16, 32_000, 2816
TRAINING = [(4, 8192), (16, 2048), (1, 32_768), (1, 131_072), (1, 2048)]
HOST = (1, 256)
PADDED = (16, 2048)
PREFILL = [(1, 8192), (1, 65_536)]
# batch, tokens of the prompt
DECODING = [(1, 1000), (16, 1000), (1, 65_536), (1, 1_000_000)]
# Longest prompt of a model whose cache grows.
GROWS = 65_536
NEW_TOKENS = 40
# Of four layers, over and over.
FEW_WINDOWS = [{}, *({"sliding_window": 0} for _ in range(3))]
MODELS = ("vort", "vort_s12", "llama", "retnet", "gla")

# Parts of a step by the names of kernels; the first that matches.
PARTS = [
    (
        "retention",
        r"^((key|(lean_)?query|output|normalizer|state|weights)_kernel|carry|chunk_|fused_recurrent)",
    ),
    ("full attention", r"flash|fmha"),
    ("local attention", r"attend|local|rotate|rope"),
    ("matrix products", r"gemm|nvjet|cutlass|xmma|cublas|splitK|gemv"),
    ("heads: convolution, norm, RoPE", r"heads|conv|angle|sums_gradient|taps_gradient|rotary"),
    ("feature maps", r"hedgehog|favor"),
    ("routing", r"routing|order"),
    ("norms", r"norm"),
    ("gates", r"gate|swiglu|silu"),
    ("loss", r"loss|cross_entropy|softmax|nll"),
    ("elementwise and copies", r"."),
]


def build(name: str, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """The model called `name` on the GPU."""
    torch.manual_seed(0)
    common = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS}
    if name.startswith("vort"):
        from vort.models import VortConfig, VortForCausalLM

        config: Any = VortConfig(
            **common, num_attention_heads=HEADS, intermediate_size=MLP, output_gate=True,
            num_scales=12 if "s12" in name else 8, use_entropy="plain" not in name,
            layer_settings=FEW_WINDOWS if "w4" in name else None,
            max_position_embeddings=131_072, pad_token_id=None, bos_token_id=None,
            eos_token_id=None,
        )  # fmt: skip
        model: Any = VortForCausalLM(config)
    elif name == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            **common, num_attention_heads=HEADS, num_key_value_heads=HEADS, intermediate_size=MLP,
            max_position_embeddings=131_072, tie_word_embeddings=True, attn_implementation="sdpa",
            pad_token_id=None, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
    else:
        import fla.models as peers

        kind = {"retnet": "RetNet", "gla": "GLA"}[name]
        config = getattr(peers, f"{kind}Config")(
            **common, num_heads=HEADS if name == "retnet" else 4,
            max_position_embeddings=131_072, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        model = getattr(peers, f"{kind}ForCausalLM")(config)
    return model.to("cuda", dtype)


def median_ms(call: Callable[[], Any], least: int = 5, seconds: float = 2.0) -> float:
    """Median milliseconds of a call, after two to warm up, by CUDA events."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    times, began = [], time.perf_counter()
    while len(times) < least or (time.perf_counter() - began < seconds and len(times) < 50):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last))
    return statistics.median(times)


def loss_of(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Under autocast where weights are wider than bfloat16."""
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    with torch.autocast("cuda", torch.bfloat16, enabled=model.dtype == torch.float32):
        loss: torch.Tensor = model(**batch, use_cache=False).loss
    return loss


def training(
    model: Any,
    batch: int,
    length: int,
    detailed: bool = False,
    recorded: bool = False,
    mask: torch.Tensor | None = None,
) -> dict[str, Any]:
    """A step's milliseconds and peak memory, and what its kernels are."""
    model.train()
    ids = torch.randint(VOCABULARY, (batch, length), device="cuda")
    replay = None
    if recorded:
        from vort.models import RecordedStep

        replay = RecordedStep(model, lambda given: loss_of(model, given["input_ids"]))

    def step() -> None:
        if replay is None:
            loss_of(model, ids, mask).backward()
        else:
            replay(input_ids=ids)
        model.zero_grad(set_to_none=True)

    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    found: dict[str, Any] = {"first_s": round(time.perf_counter() - began, 1)}
    for _ in range(4 if recorded else 0):
        step()
    if replay is not None and not replay.recorded:
        raise RuntimeError("the step could not be recorded")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    found["ms"] = median_ms(step)
    # A recording's memory is its own and reserved for good: no allocation of the step counts it.
    peak = torch.cuda.memory_reserved() if recorded else torch.cuda.max_memory_allocated()
    found["peak_gib"] = peak / 2**30
    tokens = batch * length if mask is None else int(mask.sum())
    found["tokens_per_second"] = tokens / found["ms"] * 1e3
    if detailed:
        found |= kernels(step)
    return found


def padded(model: Any, batch: int, length: int) -> dict[str, Any]:
    """A step with rows of an eighth of the length up to all of it."""
    ends = torch.linspace(length / 8, length, batch, device="cuda").long()
    mask = (torch.arange(length, device="cuda") < ends[:, None]).long()
    share = round(mask.float().mean().item(), 4)
    return {"share": share, **training(model, batch, length, detailed=True, mask=mask)}


def kernels(step: Callable[[], None]) -> dict[str, Any]:
    """Launches and milliseconds of kernels in a step, by part and the longest by name."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as record:
        step()
        torch.cuda.synchronize()
    parts: dict[str, float] = defaultdict(float)
    rows, launches = [], 0
    for event in record.key_averages():
        if event.self_device_time_total <= 0:
            continue
        milliseconds = event.self_device_time_total / 1e3
        part = next(name for name, names in PARTS if re.search(names, event.key, re.IGNORECASE))
        parts[part] += milliseconds
        launches += event.count
        rows.append((round(milliseconds, 3), event.count, event.key[:100]))
    return {
        "launches": launches,
        "kernel_ms": round(sum(parts.values()), 2),
        "parts_ms": {name: round(ms, 2) for name, ms in sorted(parts.items(), key=lambda x: -x[1])},
        "longest": sorted(rows, reverse=True)[:40],
    }


@torch.no_grad()
def prefill(model: Any, batch: int, length: int) -> dict[str, Any]:
    model.eval()
    ids = torch.randint(VOCABULARY, (batch, length), device="cuda")

    def call() -> None:
        model(input_ids=ids, use_cache=True, logits_to_keep=1)

    torch.cuda.reset_peak_memory_stats()
    return {"ms": median_ms(call), "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


@torch.no_grad()
def decode(
    model: Any, ids: torch.Tensor, half_states: bool = False, more: int = 0, **options: Any
) -> tuple[float, float, float]:
    """Milliseconds a token through `generate`, from a streamer's calls.

    The mean of all, the median of the first `NEW_TOKENS`, and of as many after `more` others.
    """
    batch, times = len(ids), []

    class Clock:
        def put(self, value: Any) -> None:
            times.append(time.perf_counter())

        def end(self) -> None:
            pass

    def clock(input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        if batch > 1:
            times.append(time.perf_counter())
        return torch.zeros(batch, dtype=torch.bool, device="cuda")

    if half_states:
        options["past_key_values"] = model.new_cache(state_dtype=torch.bfloat16)
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS + more, do_sample=False,
        streamer=Clock() if batch == 1 else None, stopping_criteria=[clock], **options,
    )  # fmt: skip
    torch.cuda.synchronize()
    last = time.perf_counter()
    apart = [1e3 * (b - a) for a, b in pairwise(times[8:])]
    mean = 1e3 * (last - times[8]) / (NEW_TOKENS + more - 8)
    first, later = apart[: NEW_TOKENS - 8], apart[8 - NEW_TOKENS :]
    return mean, statistics.median(first), statistics.median(later)


def decoding(model: Any, batch: int, length: int, **options: Any) -> dict[str, Any]:
    """Milliseconds a token after prompts of one length; see `decode`."""
    model.eval()
    ids = torch.randint(VOCABULARY, (batch, length), device="cuda")
    decode(model, ids, **options)
    torch.cuda.reset_peak_memory_stats()
    runs = [decode(model, ids, **options) for _ in range(1 if length > GROWS else 3)]
    # Means say what a text takes; medians, whether a step takes longer than another.
    found = {"ms": statistics.median(mean for mean, _, _ in runs)}
    found["median_ms"] = statistics.median(middle for _, middle, _ in runs)
    return found | {"peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def in_turns(model: Any, lengths: list[int], rounds: int = 5) -> dict[str, Any]:
    """Median milliseconds a token by the length of the prompt, texts of all lengths in turns."""
    model.eval()
    prompts = {n: torch.randint(VOCABULARY, (1, n), device="cuda") for n in lengths}
    for ids in prompts.values():
        decode(model, ids)
    runs: dict[int, list[tuple[float, float, float]]] = {n: [] for n in lengths}
    for number in range(rounds):
        for n in lengths if number % 2 == 0 else reversed(lengths):
            runs[n].append(decode(model, prompts[n], more=4 * NEW_TOKENS))

    def medians(at: int) -> dict[str, float]:
        return {str(n): statistics.median(run[at] for run in each) for n, each in runs.items()}

    first, later = medians(1), medians(2)
    found: dict[str, Any] = {"median_ms": first, "later_ms": later, "rounds": rounds}
    found["most_to_least"] = max(first.values()) / min(first.values())
    found["later_most_to_least"] = max(later.values()) / min(later.values())
    return found


@torch.no_grad()
def recorded_step(model: Any) -> dict[str, Any]:
    """The recording that decoded last, by itself: its replay and its kernels."""
    from vort.models.decoding import _last

    graph = _last[model].graph
    found = kernels(graph.replay)
    found.pop("longest")
    return {"ms": median_ms(graph.replay, seconds=0.5), **found}


def measure(name: str, out: Path, found: dict[str, Any], only: str, run: int | None) -> None:
    """Everything of one model that `found` lacks, written after each measurement."""
    plain, *how = name.split("+")
    model = build(plain, torch.float32 if "autocast" in how else torch.bfloat16)
    record = found.setdefault(name, {})
    record["parameters"] = sum(x.numel() for x in model.parameters())
    if "compile" in how:
        model.forward = torch.compile(model.forward)

    def attempt(key: str, call: Callable[[], dict[str, Any]]) -> None:
        if key in record or not re.search(only, key):
            return
        began = time.perf_counter()
        try:
            record[key] = call()
        except Exception as problem:
            record[key] = {"error": f"{type(problem).__name__}: {problem}"[:300]}
        record[key]["seconds"] = round(time.perf_counter() - began, 1)
        if run is not None:
            record[key]["run"] = run
        torch.cuda.empty_cache()
        out.write_text(json.dumps(found, indent=1) + "\n")
        shown = {k: v for k, v in record[key].items() if k != "longest"}
        print(f"{name:10s} {key:22s} {json.dumps(shown)}", flush=True)

    rows = [f"train {batch}x{length}" for batch, length in TRAINING]
    if any(key not in record and re.search(only, key) for key in rows):
        began = time.perf_counter()
        ids = torch.randint(VOCABULARY, TRAINING[0], device="cuda")
        model.train()
        loss_of(model, ids).backward()
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        record["tuning_s"] = round(time.perf_counter() - began, 1)
    for batch, length in [HOST, *TRAINING]:
        key = f"train {batch}x{length}"
        detailed = (batch, length) == TRAINING[0]
        recorded = "recorded" in how
        attempt(key, lambda b=batch, t=length, d=detailed, r=recorded: training(model, b, t, d, r))
    if how:
        return
    for batch, length in PREFILL:
        attempt(f"prefill {batch}x{length}", lambda b=batch, t=length: prefill(model, b, t))
    for batch, length in DECODING:
        if length > GROWS and name in ("llama", "gla"):
            continue
        attempt(f"decode {batch}x{length}", lambda b=batch, t=length: decoding(model, b, t))
        if plain.startswith("vort") and length <= 1000:
            attempt(f"step {batch}", lambda: recorded_step(model))
            half = f"decode bf16 states {batch}x{length}"
            attempt(half, lambda b=batch, t=length: decoding(model, b, t, half_states=True))
            attempt(f"step bf16 states {batch}", lambda: recorded_step(model))
        if name == "llama" and length <= 1000:
            static = {"cache_implementation": "static"}
            attempt(
                f"decode static {batch}x{length}",
                lambda b=batch, t=length, s=static: decoding(model, b, t, **s),
            )
    if plain.startswith("vort"):
        lengths = [length for batch, length in DECODING if batch == 1]
        attempt("decode in turns", lambda: in_turns(model, lengths))
    # Last: peers choose their kernels again for packed rows, which may take minutes.
    batch, length = PADDED
    attempt(f"train padded {batch}x{length}", lambda: padded(model, *PADDED))


def about() -> dict[str, str]:
    """Where the figures come from."""
    from importlib.metadata import PackageNotFoundError, version

    def of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    packages = ("triton", "transformers", "flash-linear-attention")
    return {**provenance(), **{name: of(name) for name in packages}}


def begin_run(found: dict[str, Any], run: dict[str, Any]) -> int | None:
    """The number of a run in `found`, by which its rows are marked; None for the first of all."""
    if "made_by" not in found:
        found["made_by"] = run
        return None
    found.setdefault("runs", []).append(run)
    return len(found["runs"]) - 1


def merge(found: dict[str, Any], other: dict[str, Any]) -> int:
    """Take the rows that `found` lacks from `other`, each with the run it is from; how many."""
    numbers: dict[int | None, int | None] = {}
    taken = 0
    for name, record in other.items():
        if name in ("made_by", "runs"):
            continue
        own = found.setdefault(name, {})
        for key, row in record.items():
            if key in own or not isinstance(row, dict):
                own.setdefault(key, row)
                continue
            before = row.get("run")
            if before not in numbers:
                run = other["made_by"] if before is None else other["runs"][before]
                numbers[before] = begin_run(found, run)
            number = numbers[before]
            own[key] = {k: v for k, v in row.items() if k != "run"}
            if number is not None:
                own[key]["run"] = number
            taken += 1
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("model_gpu.json"))
    parser.add_argument("--with", dest="folder", type=Path, help="folder with packages of peers")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--only", default="", help="rows whose name matches, e.g. 'train|prefill'")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument(
        "--merge", type=Path, help="take missing rows from this file; no GPU needed"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--run", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.merge is not None:
        found = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {}
        taken = merge(found, json.loads(arguments.merge.read_text()))
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{taken} rows of {arguments.merge} are new in {arguments.out}")
        return
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    if arguments.folder is not None:
        sys.path.insert(0, str(arguments.folder))
    keep = arguments.out.is_file() and (arguments.resume or arguments.one)
    found = json.loads(arguments.out.read_text()) if keep else {}
    if arguments.one:
        measure(arguments.one, arguments.out, found, arguments.only, arguments.run)
        return
    run = begin_run(found, about())
    arguments.out.write_text(json.dumps(found))
    for name in arguments.models.split(","):
        command = [sys.executable, __file__, "--one", name, "--out", str(arguments.out)]
        command += ["--only", arguments.only]
        command += [] if run is None else ["--run", str(run)]
        if arguments.folder is not None:
            command += ["--with", str(arguments.folder)]
        subprocess.run(command, check=False, env=os.environ)


if __name__ == "__main__":
    main()
