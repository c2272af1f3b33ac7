"""What is measured on a trained model, or on a layer, besides the scores of training itself."""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vort.training import evaluate
from vort.training.metrics import Metrics

__all__ = ["AFTER", "by_lag", "cost_of_layer", "fine_bounds", "orders_by_kind"]

BINS = 40


def by_lag(model: Any, task: Any, config: Any, *, sequences: int | None = None) -> dict[str, Any]:
    """Test scores by the task's buckets, and `lags`: accuracy in about five classes a decade.

    sequences: how many of the test split; as the config says by default.
    """
    fine = replace(task, bounds=fine_bounds(task.length, task.bounds))
    size = config.evaluation_batch_size or config.batch_size
    count = config.test_sequences if sequences is None else sequences
    with precision_of(config):
        scores = evaluate(model, fine, "test", sequences=count, batch_size=size)
    limits = [0, *fine.bounds, task.length]
    lags = [
        {"low": low + 1, "high": high, **scores[name]}
        for name, low, high in zip(fine.bucket_names, limits[:-1], limits[1:], strict=True)
        if name in scores
    ]
    return {"test": merge(lags, task), "lags": lags}


def precision_of(config: Any) -> Any:
    """The autocast that a model was trained under, for scoring it outside the training loop."""
    half = config.precision == "bf16" or (
        config.precision == "auto"
        and torch.cuda.is_available()
        and torch.cuda.is_bf16_supported(including_emulation=False)
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.autocast(device, torch.bfloat16) if half else nullcontext()


def fine_bounds(length: int, kept: Sequence[int]) -> tuple[int, ...]:
    """Upper ends of lag classes, evenly spaced in the logarithm, the given ones among them.

    >>> fine_bounds(100, (30,))
    (1, 2, 3, 4, 6, 10, 16, 25, 30, 40, 63)
    """
    count = int(np.log10(max(length, 2)) * 5)
    even = {round(10 ** (i / 5)) for i in range(count + 1)}
    return tuple(sorted(x for x in even | set(kept) if x < length))


def merge(lags: Sequence[dict[str, Any]], task: Any) -> Metrics:
    """Scores by the task's own buckets, from those by finer classes."""
    found: Metrics = {}
    limits = [0, *task.bounds, task.length]
    parts = {
        name: [lag for lag in lags if low < lag["high"] <= high]
        for name, low, high in zip(task.bucket_names, limits[:-1], limits[1:], strict=True)
    }
    for name, members in {**parts, "all": list(lags)}.items():
        count = sum(lag["count"] for lag in members)
        if count:
            found[name] = {
                key: sum(lag[key] * lag["count"] for lag in members) / count
                for key in ("accuracy", "bits")
            } | {"count": count}
    return found


@torch.no_grad()
def orders_by_kind(model: Any, task: Any, config: Any) -> dict[str, Any]:
    """How orders are distributed over kinds of tokens: mean, spread and histogram on [0, 1].

    Kinds: anchors (or first mentions), queries (or later mentions) and fillers of generated tasks;
    names found by the rule probe, capital letters of other words and everything else in text.
    """
    device = next(model.parameters()).device
    model.eval()
    batch = task.batch("test", range(min(4, task.size("test") or 4)))
    extras = {"entity_mask": batch["entity_mask"].to(device)} if "entity_mask" in batch else {}
    ids = batch["input_ids"].to(device)
    with precision_of(config):
        layers = model.model(ids, use_cache=False, output_orders=True, **extras).orders
    kinds = _kinds(task, batch)
    return {
        "bins": BINS,
        "layers": [
            {name: _distribution(order.float().cpu()[member]) for name, member in kinds.items()}
            for order in layers
            if order is not None
        ],
    }


def _kinds(task: Any, batch: Any) -> dict[str, Tensor]:
    """Which positions `[B, T]` are of which kind."""
    tokens = batch["input_ids"]
    if hasattr(task, "vocabulary"):
        asked = batch["labels"] >= 0
        shows = task.vocabulary.shows_key(tokens)
        return {"first": shows & ~asked, "again": shows & asked, "filler": ~shows}
    from vort.layers.entity_probe import RuleProbe

    named = torch.zeros_like(tokens, dtype=torch.bool)
    for row, ids in enumerate(tokens):
        # One character for each byte, so that spans of characters are spans of tokens.
        text = bytes(ids.tolist()).decode("latin-1")
        for start, end in RuleProbe().probe(text):
            named[row, start:end] = True
    letters = ((tokens >= 65) & (tokens <= 90)) | ((tokens >= 97) & (tokens <= 122))
    return {"entity": named, "other letters": ~named & letters, "rest": ~named & ~letters}


def _distribution(orders: Tensor) -> dict[str, Any]:
    if not orders.numel():
        return {"count": 0}
    histogram = torch.histc(orders, BINS, 0.0, 1.0)
    return {
        "count": int(orders.shape[0]),
        "mean": orders.mean().item(),
        "deviation": orders.std(correction=0).item(),
        "heads": orders.mean(0).tolist(),
        "histogram": (histogram / histogram.sum()).tolist(),
    }


def heavy_hitters(
    model: Any, task: Any, config: Any, *, state_numbers: int, sequences: int
) -> dict[str, Any]:
    """Test scores of a softmax model under H2O's cache policy, its state as large as given.

    Args:
        model: it is changed.
        task: as trained on.
        config: of the training.
        state_numbers: what decoding may keep for one sequence and layer; as many tokens as fit.
        sequences: of the test split; the policy goes token by token, which takes its time.
    """
    from vort.baselines import HeavyHitterMemory

    size = 0
    for block in model.model.layers:
        full = block.self_attn.memory
        per_token = full.num_heads * (2 * full.head_dim + 2)
        budget = max(2, state_numbers // per_token)
        kept = HeavyHitterMemory(
            full.num_heads, full.head_dim, budget=budget, rope_base=full.rope_base
        )
        block.self_attn.memory = kept
        size += kept.state_size()
    found = by_lag(model, task, config, sequences=sequences)
    return {**found, "budget": budget, "state_numbers": size}


AFTER: dict[str, Callable[..., dict[str, Any]]] = {"orders": orders_by_kind, "h2o": heavy_hitters}


def cost_of_layer(config: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Seconds and peak bytes of one attention layer at one length, forward and with backward.

    In a process of its own: the peak of a process counts from its start. `settings`: length, batch,
    repeats. Bytes are those of the device; on a CPU, what the process grew by, read on Linux only.
    """
    request = json.dumps({"config": config, **settings})
    command = [sys.executable, "-c", "from vort.experiments.measures import _cost; _cost()"]
    found = subprocess.run(command, input=request, capture_output=True, text=True, check=False)
    if found.returncode:
        raise RuntimeError(found.stderr.strip().splitlines()[-1])
    result: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return result


def _cost() -> None:
    """Read a request, print the measurement: what `cost_of_layer` starts."""
    from vort.models import VortConfig
    from vort.models.building import attention_of

    request = json.loads(sys.stdin.read())
    length, batch = request["length"], request["batch"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = VortConfig(**request["config"])
    layer = attention_of(config).to(device)
    x = torch.randn(batch, length, config.hidden_size, device=device, requires_grad=True)

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
    times = {"forward": _median(infer, request["repeats"], device)}
    times["forward_backward"] = _median(both, request["repeats"], device)
    print(json.dumps({"length": length, "batch": batch, "times": times, "peak_bytes": peak}))


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
