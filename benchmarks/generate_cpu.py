"""Tokens a second of a small model on a CPU: a session, `generate`, and a Llama of the same size.

    python benchmarks/generate_cpu.py [--rounds 7] [--tokens 64] [--threads 2]
        [--out results/bench/generate_cpu.json]

float32, batch 1, greedy, random weights of 5 M parameters, after a prompt of 256 tokens and after
one of 4,096. The prompt is read before the clock starts: for `generate` its time alone is taken
off. The candidates take turns within every round; a figure is the median of its rounds.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from vort.lab.report.provenance import provenance
from vort.models import VortConfig, VortForCausalLM
from vort.models.session import VortSession

VOCABULARY, WIDTH, LAYERS, HEADS, INNER = 4096, 256, 5, 4, 704
PROMPTS = (256, 4096)


def vort_model() -> VortForCausalLM:
    config = VortConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        sliding_window=64,
    )
    return VortForCausalLM(config).eval()


def llama_model() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        max_position_embeddings=2 * max(PROMPTS),
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config).eval()


def by_session(model: VortForCausalLM, prompt: torch.Tensor, tokens: int) -> Callable[[], float]:
    """Seconds of `tokens` tokens, each time from the end of the prompt."""
    fed = VortSession(model)
    fed.feed(prompt)

    def run() -> float:
        session = fed.branch()
        start = time.perf_counter()
        for _ in session.generate(tokens, temperature=0, stop=()):
            pass
        return time.perf_counter() - start

    return run


def by_generate(model: Any, prompt: torch.Tensor, tokens: int) -> Callable[[], float]:
    """Likewise through `generate`: a call with `tokens` more, less a call with one token."""

    def call(count: int) -> float:
        start = time.perf_counter()
        model.generate(
            prompt,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        return time.perf_counter() - start

    def run() -> float:
        first = call(1)
        return call(tokens + 1) - first

    return run


def measure(rounds: int, tokens: int, threads: int) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    load = os.getloadavg()[0]
    ours, llama = vort_model(), llama_model()
    candidates = {}
    for length in PROMPTS:
        prompt = torch.randint(1, VOCABULARY, (1, length))
        candidates[f"VORT, session, {length}"] = by_session(ours, prompt, tokens)
        candidates[f"VORT, generate, {length}"] = by_generate(ours, prompt, tokens)
        candidates[f"Llama, generate, {length}"] = by_generate(llama, prompt, tokens)
    rates: dict[str, list[float]] = {name: [] for name in candidates}
    for warm in (True, *[False] * rounds):
        for name, run in candidates.items():
            seconds = run()
            if not warm:
                rates[name].append(tokens / seconds)
    return {
        "made_by": {
            **provenance(),
            "transformers": transformers.__version__,
            "device": platform.processor() or platform.machine(),
            "threads": threads,
            "load_average_before": load,
        },
        "shape": {
            "vocabulary": VOCABULARY,
            "width": WIDTH,
            "layers": LAYERS,
            "heads": HEADS,
            "inner": INNER,
            "dtype": "float32",
        },
        "parameters": {
            "VORT": sum(p.numel() for p in ours.parameters()),
            "Llama": sum(p.numel() for p in llama.parameters()),
        },
        "rounds": rounds,
        "tokens": tokens,
        "tokens_per_second": {name: statistics.median(x) for name, x in rates.items()},
        "best_tokens_per_second": {name: max(x) for name, x in rates.items()},
    }


def show(result: dict[str, Any]) -> None:
    if result["made_by"]["load_average_before"] > 0.5:
        print("others use this machine: compare rows of this run alone")
    for name, count in result["parameters"].items():
        print(f"{name + ', parameters':<38}{count / 1e6:>10.2f} M")
    print(f"{'tokens a second, after a prompt of':<38}{'median':>10}{'best':>10}")
    for name, value in result["tokens_per_second"].items():
        print(f"{name:<38}{value:>10.1f}{result['best_tokens_per_second'][name]:>10.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("results/bench/generate_cpu.json"))
    arguments = parser.parse_args()
    result = measure(arguments.rounds, arguments.tokens, arguments.threads)
    show(result)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"\nwritten to {arguments.out}")


if __name__ == "__main__":
    main()
