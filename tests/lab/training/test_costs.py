"""The cost model against runs that were measured, and against what is really sent."""

import json
import runpy
from pathlib import Path

import pytest

from vort.lab.training.costs import (
    GIB,
    PLAN_SIZES,
    Arrangement,
    Costs,
    Shape,
    arrange,
    estimate,
    on_one,
)

ROOT = Path(__file__).parents[3]
MEASURED = ROOT / "results" / "bench" / "model_gpu.json"
TOOL = runpy.run_path(str(ROOT / "tools" / "fit_costs.py"))


def test_measured_runs_are_within_15_percent_in_memory_and_20_in_time() -> None:
    document = json.loads(MEASURED.read_text())
    shape, costs = Shape.of(**TOOL["SETTINGS"]), Costs.load()
    assert shape.parameters == document["vort"]["parameters"]
    runs = TOOL["runs"](document["vort"])
    assert len(runs) >= 6
    for name, (tokens, run) in runs.items():
        memory, seconds = on_one(shape, tokens, costs)
        again = f"{name}: run tools/fit_costs.py {MEASURED.name} again, or the model is too simple"
        assert memory / GIB == pytest.approx(run["peak_gib"], rel=0.15), again
        assert seconds * 1e3 == pytest.approx(run["ms"], rel=0.2), again


def test_constants_are_those_that_the_tool_fits() -> None:
    document = json.loads(MEASURED.read_text())
    costs = Costs.load()
    fitted = TOOL["fit"](document["vort"], dict(costs.made_by))
    for name, value in vars(costs).items():
        if name != "made_by":
            assert getattr(fitted, name) == pytest.approx(value, rel=1e-9), name
    assert costs.made_by["commit"] == document["made_by"]["commit"]


def test_a_million_tokens_over_eight_ranks_fit() -> None:
    shape, costs = Shape.of(**PLAN_SIZES["1.3b"]), Costs.load()
    options = {"memory": 80e9, "bandwidth": 50e9}
    way = arrange(shape, 8, 2**20, costs, context=8, **options)
    assert way is not None
    assert way.data == 1
    assert arrange(shape, 1, 2**20, costs, **options) is None


def test_traffic_of_context_parallel_does_not_know_the_length_and_is_counted_from_states() -> None:
    settings = PLAN_SIZES["125m"]
    shape, costs = Shape.of(**settings), Costs.load()
    found = [
        estimate(shape, Arrangement(8, 4, 2, length, False, 1e9), costs).traffic
        for length in (2**16, 2**20)
    ]
    assert found[0] == found[1]
    state = settings["num_attention_heads"] * settings["num_scales"] * 64 * (64 + 1) * 4
    assert found[0]["all-gather of states"] == 2 * 12 * 3 * 2 * state
    assert found[0]["halos"] == 2 * 12 * 2 * (127 + 3) * 768 * 2
