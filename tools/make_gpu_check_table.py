"""Write the table of docs/benchmarks.md that says what was checked on a GPU, from its files.

Of a case that was run more than once the last run counts; what was beyond its bound in an earlier
one is listed below the table, and so are cases that are planned and have not been run.

python tools/make_gpu_check_table.py
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.ops.check_gpu import all_jobs, name_of  # noqa: E402

from vort.lab.report.tables import Sheet  # noqa: E402

PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- gpu checks: tools/make_gpu_check_table.py -->", "<!-- end of gpu checks -->"
# In the order they were run.
FILES = (
    *("gpu_check", "gpu_check_retention", "gpu_check_model", "gpu_check_decoding"),
    *("gpu_check_heads", "gpu_check_kernels", "gpu_check_parts", "gpu_check_asked"),
    *("gpu_check_gated", "gpu_check_pairs", "gpu_check_pairs_gated", "gpu_check_scales"),
    *("gpu_check_heads_float32", "gpu_check_autocast", "gpu_check_heads_and_steps"),
    *("gpu_check_rest", "gpu_check_rivals", "gpu_check_nineteen", "gpu_check_steps"),
    *("gpu_check_step_bf16", "gpu_check_step_float32"),
)
COMMITS = {"gpu_check_kernels": "f71223b"}  # the file lacks it
# A part, and how its cases begin; the first that fits.
PARTS = {
    "retention at places asked for": r"retention .*asked=",
    "retention": "retention",
    "local attention": "local attention|sums left for the window",
    "heads: convolution, norm, RoPE, features": "heads(?!,)",
    "Hedgehog map": "hedgehog",
    "FAVOR+": "favor",
    "norms": "rms_norm|add_rms_norm|sum and norm",
    "products, MLP, gated norm, loss": "products|gated_(linear|mlp|norm)|cross_entropy",
    "routing and order weights": "routing|order_weights",
    "gated attention at places asked for": "gated asked",
    "a layer at once against its ops": "a layer at once",
    "kernels of a step of decoding, states in bf16": "(step of memory, )?bfloat16 states",
    "kernels of a step of decoding": "step|few rows|local step|heads, steps",
    "recorded steps and prompts of models, states in bf16": "model: .*bfloat16 states",
    "recorded steps and prompts of models": "model: ",
    "under `torch.compile`": "torch.compile",
}


class Check(NamedTuple):
    """One case in one type: the file it is of, its largest error, and whether that is allowed."""

    file: str
    commit: str
    passed: bool
    where: str
    error: float


Name = tuple[str, str]  # of a case and of a type


def checks() -> Iterator[tuple[Name, Check]]:
    """Every case of every file, those that were run first first."""
    for file in FILES:
        found: dict[str, Any] = json.loads((ROOT / f"results/bench/{file}.json").read_text())
        commit = found.get("commit") or COMMITS[file]
        for record in found.get("records", []):
            where, error = record["worst"]
            name = record["case"], record["dtype"]
            yield name, Check(file, commit, record["ok"], where, float(error))
        if isinstance(found["cases"], dict):  # of tests/models/decoding_cases.py
            for full, case in found["cases"].items():
                case_name, dtype = full.rsplit(", ", 1)
                name = f"model: {case_name}", dtype
                yield name, Check(file, commit, case["passed"], "logits", case["error"])


def part_of(case: str) -> str:
    """The part of the library that a case is about."""
    return next(part for part, begins in PARTS.items() if re.match(begins, case))


def table() -> str:
    """What today's cases found, what was beyond its bound once, and what has not been run."""
    found = list(checks())
    last = dict(found)
    planned = [name_of(job) for job in all_jobs(0)]
    planned += [name for name in last if name[0].startswith("model: ")]
    rows = []
    for part in PARTS:
        mine = [name for name in planned if part_of(name[0]) == part]
        runs = {last[name].file: last[name].commit for name in mine if name in last}
        files = [f"{_short(file)} ({runs[file]})" for file in FILES if file in runs]
        rows.append([part, *_both(mine, last, "float32"), *_both(mine, last, "bfloat16")])
        rows[-1].append(", ".join(files))
    headings = ["part", "float32", "worst error", "bf16", "worst error", "`gpu_check*.json`"]
    lines = [Sheet("", headings, rows).to_markdown().partition("\n\n")[2]]
    lines += ["Beyond its bound in a run, and what came after:", ""]
    for name, check in found:
        if not check.passed:
            after = f"{last[name].error:.1e} in {_short(last[name].file)}"
            if last[name] is check:
                after = "not run again at this size"
            told = f"{check.error:.1e} in {_short(check.file)}"
            lines.append(f"- {' '.join(name)}, {check.where}: {told}; {after}.")
    missing = [name for name in planned if name not in last]
    if not missing:
        return "\n".join([*lines, "", "Every planned case has a record at the size it has now."])
    lines += ["", f"Planned, and not run at the sizes they have now, {len(missing)} cases:", ""]
    for part in PARTS:
        for dtype in ("float32", "bfloat16"):
            count = sum(part_of(case) == part and kind == dtype for case, kind in missing)
            lines += [f"- {part}, {dtype}: {count}"] * (count > 0)
    return "\n".join(lines)


def _both(names: list[Name], last: dict[Name, Check], dtype: str) -> list[str]:
    """How many cases of a type passed, of those planned, and the largest error among them."""
    mine = [name for name in names if name[1] == dtype]
    if not mine:
        return ["–", "–"]
    run = [last[name] for name in mine if name in last]
    passed = f"{sum(check.passed for check in run)} of {len(mine)}"
    return [passed, f"{max(check.error for check in run):.1e}" if run else "–"]


def _short(file: str) -> str:
    """What a file has in its name beyond what all have: the first has nothing."""
    return file.removeprefix("gpu_check").removeprefix("_") or "the first"


def page() -> str:
    """The page with the table of today."""
    before, rest = PAGE.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page())
