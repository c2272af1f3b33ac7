"""Mutations that no test may let live: wrong lines that would change results without a word.

`python tests/mutations.py` (or `make mutations`) puts each into a copy of the tree and runs the
tests that should fail; names as arguments choose some, `--list` shows all. It takes minutes and is
no part of `make test`. Exit status 1: one survived, or no longer fits the code.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
# What is not the project, or large and made from it.
LEFT_OUT = (".*", "__pycache__", "reports", "site", "dist")
PASSED, FAILED = 0, 1  # of pytest's exit statuses


class Mutation(NamedTuple):
    """A line of the code, what it becomes, and who must notice.

    Attributes:
        name: what the code does then.
        file: below `src/vort`.
        old: text that stands there exactly once.
        new: put in its place.
        tests: what pytest is given.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


BACKENDS = "tests/ops/retention/test_backends.py tests/ops/retention/test_states.py"
MEMORIES = "tests/memories/test_memories.py"
NEAR = (
    "tests/ops/local_attention/test_block_equals_exact.py tests/ops/local_attention/test_local.py"
)
RIVALS = "tests/memories/test_rivals.py"
KIN = "tests/lab/experiments/test_kin.py"
ROWS = "tests/lab/experiments/test_models.py tests/lab/experiments/test_tables.py"

MUTATIONS = (
    # A convolution's gradient, walked through in segments.
    Mutation(
        "segments beyond the last read three positions of another row",
        "ops/short_convolution/triton/taps.py",
        "segment % per_row * SPAN - LEAD, length + 4)",
        "segment % per_row * SPAN - LEAD, length)",
        "tests/ops/short_convolution/test_interpreter.py",
    ),
    Mutation(
        "a value's second reader sends nothing back",
        "ops/short_convolution/triton/taps.py",
        "        d += widen(again)\n",
        "        d += 0.0\n",
        "tests/ops/short_convolution/test_interpreter.py",
    ),
    Mutation(
        "what a packed sequence began with reaches into the one before",
        "ops/short_convolution/triton/taps.py",
        "    d1 = reach(d1, old1, 1, HAS_AGE)\n",
        "",
        "tests/ops/short_convolution/test_interpreter.py",
    ),
    # Rows of the tables that are not what they say.
    Mutation(
        "weights always from seed 0",
        "lab/experiments/models.py",
        "torch.manual_seed(seed)",
        "torch.manual_seed(0)",
        ROWS,
    ),
    Mutation(
        "GLA's gate power ignored",
        "memories/gla.py",
        "F.logsigmoid(widen(logits)) / GATE_POWER",
        "F.logsigmoid(widen(logits))",
        RIVALS,
    ),
    Mutation(
        "mixture rates all start at 1",
        "memories/mixture.py",
        "torch.linspace(0, slowest, self.num_scales)",
        "torch.zeros(self.num_scales)",
        RIVALS,
    ),
    Mutation(
        "the tuned decay ignored",
        "lab/experiments/search.py",
        "return {name: value for name, value in found.items() if takes.get(name, False)}",
        "return {}",
        KIN,
    ),
    Mutation(
        "the row with gates has none",
        "lab/experiments/models.py",
        '{"memory": "mixture"}, has=_GATES, kin="mixture"',
        '{"memory": "mixture", **PLAIN}, has=_GATES, kin="mixture"',
        ROWS,
    ),
    Mutation(
        "another kin's tuned rates",
        "lab/experiments/models.py",
        '{"memory": "mixture"}, has=_GATES, kin="mixture"',
        '{"memory": "mixture"}, has=_GATES, kin="exponential"',
        KIN,
    ),
    Mutation(
        "betas counted as seeds",
        "lab/experiments/scores.py",
        "    for seed, value in pairs:\n",
        "    for seed, (_, value) in enumerate(pairs):\n",
        "tests/lab/experiments/test_scores.py",
    ),
    Mutation(
        "one seed decides",
        "lab/verdicts.py",
        "LEAST_SEEDS = 3",
        "LEAST_SEEDS = 1",
        "tests/lab/test_verdicts.py",
    ),
    Mutation(
        "a search takes another row's trials",
        "lab/experiments/search.py",
        '(line["size"], line["experiment"], line["row"]) == place]',
        '(line["size"], line["experiment"]) == place[:2]]',
        "tests/lab/experiments/test_search.py",
    ),
    Mutation(
        "a short trial counts as much as a whole one",
        "lab/experiments/search.py",
        'return [line for line in staged if line["stage"] == stage]',
        "return staged",
        "tests/lab/experiments/test_search.py",
    ),
    Mutation(
        "the interval dropped from a verdict",
        "lab/verdicts.py",
        "    if gain.low <= 0:",
        "    if gain.mean <= 0:",
        "tests/lab/test_verdicts.py",
    ),
    Mutation(
        "read and write swapped in the layer",
        "memories/retention_memory.py",
        "routing.write,\n            routing.log_decay,\n            read=routing.read,",
        "routing.write if routing.read is None else routing.read,\n            routing.log_decay,\n"
        "            read=None if routing.read is None else routing.write,",
        f"{MEMORIES} {RIVALS} tests/layers/test_vort_attention.py",
    ),
    Mutation(
        "include_self ignored by the layer",
        "memories/retention_memory.py",
        "include_self=self.include_self,\n            initial_state",
        "include_self=True,\n            initial_state",
        f"{MEMORIES} {RIVALS} tests/layers/test_vort_attention.py",
    ),
    # Kernels and states.
    Mutation(
        "weights of the kernel one lag off",
        "fractional/gl.py",
        "factors = (lags - 1 + order[..., None]) / lags",
        "factors = (lags + order[..., None]) / (lags + 1)",
        "tests/fractional/test_gl.py",
    ),
    Mutation(
        "the plain memory does not decay",
        "fractional/soe.py",
        "state = decays * state + self.weights[:, None] * value",
        "state = state + self.weights[:, None] * value",
        "tests/fractional/test_soe.py",
    ),
    Mutation(
        "a bank is written by all tokens",
        "fractional/soe.py",
        "rule.states(tokens * (banks == k))",
        "rule.states(tokens)",
        "tests/fractional/test_soe.py",
    ),
    Mutation(
        "a basis for another horizon",
        "memories/vort.py",
        "PowerLawBasis.fit(horizon, num_scales",
        "PowerLawBasis.fit(max(2, horizon // 8), num_scales",
        "tests/memories/test_router.py",
    ),
    Mutation(
        "states leave a chunk one step too old",
        "ops/retention/chunk/piece.py",
        "steps = self.lengths[:, None] - 1 - torch",
        "steps = self.lengths[:, None] - torch",
        BACKENDS,
    ),
    Mutation(
        "states enter a chunk one step too young",
        "ops/retention/chunk/piece.py",
        "self.arrive = power[1:].transpose",
        "self.arrive = power[:-1].transpose",
        BACKENDS,
    ),
    Mutation(
        "tokens of a chunk see themselves where they must not",
        "ops/retention/chunk/weights.py",
        ">= (0 if include_self else 1)",
        ">= 0",
        BACKENDS,
    ),
    Mutation(
        "a step reads the memory before it has aged",
        "ops/retention/recurrent.py",
        "        gate = gate * (kept + aged)[..., 0, 0]",
        "        gate = gate * 1",
        BACKENDS,
    ),
    Mutation(
        "a step forgets the decay's sign",
        "ops/retention/recurrent.py",
        "torch.lerp(left, log_decay.expm1(), kept)",
        "torch.lerp(left, (-log_decay).expm1(), kept)",
        BACKENDS,
    ),
    Mutation(
        "no normaliser in a step",
        "ops/retention/recurrent.py",
        "return normalize(numerator, (asked * b).sum((-1, -2)).flatten(), eps)",
        "return numerator",
        BACKENDS,
    ),
    Mutation(
        "the undecayed normaliser decays",
        "ops/retention/chunk/piece.py",
        'if self.normalizer == "decayed":\n            return self.decays.drop',
        'if self.normalizer != "none":\n            return self.decays.drop[..., : self.b_rows]',
        BACKENDS,
    ),
    Mutation(
        "packed sequences run into each other",
        "memories/retention_memory.py",
        "cu_seqlens=inputs.cu_seqlens,\n            eps",
        "cu_seqlens=None,\n            eps",
        f"{MEMORIES} tests/layers/test_packing.py",
    ),
    Mutation(
        "padding ages the state of Mamba-2's recurrence",
        "memories/mamba2.py",
        "log_decay = step.masked_fill(~real, 0), log_decay.masked_fill(~real, 0)",
        "log_decay = step.masked_fill(~real, 0), log_decay",
        "tests/layers/test_vort_attention.py",
    ),
    Mutation(
        "what tokens of the delta rule changed does not decay",
        "memories/gated_delta.py",
        "before = (beta * decay * (k @ k.mT)).tril(-1)",
        "before = (beta * k @ k.mT).tril(-1)",
        "tests/memories/test_token_decay.py",
    ),
    Mutation(
        "layers of a hybrid all have the first one's memory",
        "models/block.py",
        "VortAttention(config.of_layer(layer_idx), layer_idx=layer_idx)",
        "VortAttention(config, layer_idx=layer_idx)",
        "tests/models/test_hybrids.py",
    ),
    Mutation(
        "a model is left at the horizon it was last read with",
        "lab/experiments/reading.py",
        "model.model.set_horizon(trained)",
        "pass",
        "tests/lab/experiments/test_reading.py",
    ),
    Mutation(
        "books of many windows count more than others",
        "lab/experiments/reading.py",
        "return {book: np.mean(rows, 0) for book, rows in found.items()}",
        "return {book: np.sum(rows, 0) for book, rows in found.items()}",
        "tests/lab/experiments/test_reading.py",
    ),
    Mutation(
        "padding ages the state",
        "memories/retention_memory.py",
        "if padding is None or (inputs.q.shape[1] > 1 and not output_state):",
        "if padding is None or inputs.q.shape[1] > 1:",
        f"{MEMORIES} tests/layers/test_vort_attention.py",
    ),
    Mutation(
        "a padded step writes",
        "memories/retention_memory.py",
        "return output * real, _only_where(padding.real[:, 0], after, state)",
        "return output * real, after",
        f"{MEMORIES} tests/layers/test_vort_attention.py",
    ),
    Mutation(
        "the window is one position wider",
        "ops/local_attention/exact.py",
        "(lag < window)",
        "(lag <= window)",
        NEAR,
    ),
    Mutation(
        "the ring of the window is one slot off",
        "ops/local_attention/local.py",
        "slot = state.seen % state.window",
        "slot = (state.seen + 1) % state.window",
        NEAR,
    ),
    Mutation(
        "orders fall below order_min",
        "memories/vort.py",
        "return self.order_min + (1 - self.order_min) * torch.sigmoid(logits)",
        "return torch.sigmoid(logits).clamp_min(1e-3)",
        "tests/memories/test_router.py",
    ),
    Mutation(
        "the router is not told who is an entity",
        "memories/vort.py",
        "parts.append(absent if entity is None else entity.to(hidden_states.dtype).unsqueeze(-1))",
        "parts.append(absent)",
        "tests/memories/test_router.py",
    ),
    Mutation(
        "the fixed Power-Law learns its order",
        "memories/power_law.py",
        "requires_grad=s.learn_rates)",
        "requires_grad=True)",
        f"{RIVALS} {ROWS} {MEMORIES}",
    ),
    Mutation(
        "heavy hitters forget the newest",
        "memories/softmax.py",
        "rank = self.score.masked_fill(recent, torch.inf)",
        "rank = self.score",
        "tests/memories/test_heavy_hitters.py",
    ),
    Mutation(
        "a token retrieves itself",
        "plasticity/exact.py",
        "masked_fill(lag < 1, -math.inf)",
        "masked_fill(lag < 0, -math.inf)",
        "tests/plasticity",
    ),
    # Data, scores and statistics.
    Mutation(
        "beta ignored by the task",
        "lab/tasks/zipf_retrieval.py",
        "_cumulative(self.length - 1, self.beta, 1)",
        "_cumulative(self.length - 1, 1.0, 1)",
        "tests/lab/tasks/test_zipf_retrieval.py",
    ),
    Mutation(
        "the test split is the validation split",
        "lab/tasks/task.py",
        "crc32(task.encode()) << 8 | SPLITS.index(split)",
        "crc32(task.encode()) << 8 | min(1, SPLITS.index(split))",
        "tests/lab/tasks",
    ),
    Mutation(
        "all seeds have the same data",
        "lab/tasks/task.py",
        "key = np.array([seed, which], dtype=np.uint64)",
        "key = np.array([0, which], dtype=np.uint64)",
        "tests/lab/tasks",
    ),
    Mutation(
        "sequences of a split share their numbers",
        "lab/tasks/task.py",
        "counter = np.array([0, 0, 0, index], dtype=np.uint64)",
        "counter = np.array([index, 0, 0, 0], dtype=np.uint64)",
        "tests/lab/tasks",
    ),
    Mutation(
        "a lag on the bound counts as longer",
        "lab/tasks/task.py",
        "np.searchsorted(self.bounds, row.queries - row.sources)",
        'np.searchsorted(self.bounds, row.queries - row.sources, side="right")',
        "tests/lab/tasks",
    ),
    Mutation(
        "mentions asked again keep the label in sight",
        "lab/tasks/label_copy.py",
        "words.query(",
        "words.query(0 * ",
        "tests/lab/tasks/test_label_copy.py",
    ),
    Mutation(
        "the same order of sequences in every epoch",
        "lab/training/data.py",
        "np.random.default_rng((seed, epoch))",
        "np.random.default_rng((seed, 0))",
        "tests/lab/training/test_data.py",
    ),
    Mutation(
        "an interval of one side",
        "lab/training/metrics.py",
        "t.ppf((1 + confidence) / 2, count - 1)",
        "t.ppf(confidence, count - 1)",
        "tests/lab/training/test_metrics.py",
    ),
    Mutation(
        "an interval of the normal distribution",
        "lab/training/metrics.py",
        "t.ppf((1 + confidence) / 2, count - 1)",
        "t.ppf((1 + confidence) / 2, 10**6)",
        "tests/lab/training/test_metrics.py",
    ),
    Mutation(
        "bits are nats",
        "lab/training/metrics.py",
        '"bits": nats / count / log(2)',
        '"bits": nats / count',
        "tests/lab/training/test_metrics.py",
    ),
    Mutation(
        "cells of other training settings are taken for finished",
        "lab/experiments/cell.py",
        'if f.name != "search"}',
        'if f.name not in ("search", "training")}',
        "tests/lab/experiments/test_cell.py tests/lab/experiments/test_run.py",
    ),
    Mutation(
        "padding is scored",
        "models/modeling_vort.py",
        "return given if padding is None else given.masked_fill(padding, -100)",
        "return given",
        "tests/models/test_modeling.py::test_padding_is_scored_on_nothing",
    ),
    Mutation(
        "rows without their padding are one sequence",
        "layers/packing.py",
        "return cls(bounds, True, real.flatten().nonzero().flatten())",
        "return cls(bounds[[0, -1]], True, real.flatten().nonzero().flatten())",
        "tests/models/test_modeling.py::test_on_a_gpu_padding_is_left_out_of_all_layers",
    ),
    Mutation(
        "sums that wait for each other are not added up",
        "ops/gpu/folds.py",
        "    finally:\n        _waiting.sums = None\n    _launch(sums)\n",
        "    finally:\n        _waiting.sums = None\n    _launch(sums[:1])\n",
        "tests/ops/mixing/test_interpreter.py",
    ),
    Mutation(
        "under autocast what is normed keeps its type",
        "ops/rms_norm/triton.py",
        "y = torch.empty_like(x, dtype=dtype)",
        "y = torch.empty_like(x)",
        "tests/ops/mixing/test_interpreter.py",
    ),
    Mutation(
        "read weights are not counted in what queries read",
        "lab/experiments/look.py",
        "        read=routing.read,\n",
        "        read=None,\n",
        "tests/lab/experiments/test_look.py",
    ),
    Mutation(
        "what a query reads includes itself",
        "lab/experiments/look.py",
        "include_self=False",
        "include_self=True",
        "tests/lab/experiments/test_look.py",
    ),
    # Long texts.
    Mutation(
        "a text is right where one of its needles is",
        "lab/experiments/long_context.py",
        "good = int(of_row[:, 2].all())",
        "good = int(of_row[:, 2].any())",
        "tests/lab/experiments/test_long_context.py",
    ),
    Mutation(
        "documents are merged without being aged",
        "lab/experiments/long_context.py",
        "ages.append(tokens.shape[1] - end)",
        "ages.append(0 * end)",
        "tests/lab/experiments/test_long_context.py",
    ),
    Mutation(
        "a piece of a long text forgets the one before",
        "lab/evaluation/exact.py",
        'else {"past_key_values": cache, "use_cache": True}',
        'else {"use_cache": False}',
        "tests/lab/experiments/test_long_context.py",
    ),
    Mutation(
        "the learning rate is chosen to be the worst",
        "lab/experiments/mqar.py",
        "_bits(record) < _bits(found[place])",
        "_bits(record) > _bits(found[place])",
        "tests/lab/experiments/test_long_context.py",
    ),
)


def main() -> int:
    """Judge the chosen mutations; 0 if all were killed."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="*", help="some of them; all by default")
    parser.add_argument("--list", action="store_true", help="names and files, and run nothing")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - {mutation.name for mutation in MUTATIONS})
    if unknown:
        parser.error(f"names must be of --list, got {', '.join(unknown)}")
    chosen = [m for m in MUTATIONS if not options.names or m.name in options.names]
    if options.list:
        print("\n".join(f"{mutation.name}: {mutation.file}" for mutation in chosen))
        return 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
        found = [judge(tree, mutation) for mutation in chosen]
    killed = found.count("killed")
    print(f"{killed} of {len(found)} killed")
    return 0 if killed == len(found) else 1


def judge(tree: Path, mutation: Mutation) -> str:
    """What became of a mutation in a copy of the tree, which is left as it was."""
    file = tree / "src" / "vort" / mutation.file
    text = file.read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        result = f"does not fit, its text stands there {text.count(mutation.old)} times"
    elif not passes(tree, mutation.tests):
        result = "not judged, its tests fail without it"
    else:
        file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        status = run(tree, mutation.tests)
        file.write_text(text, encoding="utf-8")
        # A tree that cannot be imported is noticed by anyone, and says nothing of the tests.
        result = {PASSED: "SURVIVED", FAILED: "killed"}.get(status, f"pytest ended with {status}")
    print(f"{result}: {mutation.name} ({mutation.file})", flush=True)
    return result


@cache
def passes(tree: Path, tests: str) -> bool:
    """Whether the untouched tree passes: tests that fail there would kill anything."""
    return run(tree, tests) == PASSED


def run(tree: Path, tests: str) -> int:
    """Exit status of pytest on a selection, which stops at its first failure."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["-m", "not slow and not gpu", *tests.split()]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True).returncode


if __name__ == "__main__":
    sys.exit(main())
