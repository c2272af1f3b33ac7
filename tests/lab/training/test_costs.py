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
    for name, (length, tokens, run) in runs.items():
        memory, seconds = on_one(shape, tokens, length, costs)
        again = f"{name}: run tools/fit_costs.py {MEASURED.name} again, or the model is too simple"
        assert memory / GIB == pytest.approx(run["peak_gib"], rel=0.15), again
        assert seconds * 1e3 == pytest.approx(run["ms"], rel=0.2), again


def test_constants_are_those_that_the_tool_fits() -> None:
    document = json.loads(MEASURED.read_text())
    costs = Costs.load()
    peers = json.loads(MEASURED.with_name("retention_gpu.json").read_text())
    fitted = TOOL["fit"](document["vort"], peers["rows"], dict(costs.made_by))
    for name, value in vars(costs).items():
        if name != "made_by":
            assert getattr(fitted, name) == pytest.approx(value, rel=1e-9), name
    assert costs.made_by["commit"] == document["made_by"]["commit"]
    assert costs.made_by["attention"].endswith(peers["commit"])


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


def parts(length: int = 2**15, *, context: int = 1, **settings: object) -> dict[str, float]:
    """Seconds and bytes of a step of the smallest size, whose layers may differ."""
    shape, costs = Shape.of(**{**PLAN_SIZES["125m"], "mlp_size": 2048, **settings}), Costs.load()
    found = estimate(shape, Arrangement(8, context, 1, length, False, 1e9), costs)
    return {**shape.seconds(length, length, costs), **found.memory, **found.traffic}


@pytest.mark.parametrize("part", ["retention", "kept for the backward", "all-gather of states"])
def test_every_layer_is_counted_with_its_own_scales(part: str) -> None:
    few, many = (parts(context=4, num_scales=scales)[part] for scales in (4, 16))
    for own in ([{"num_scales": 4}, {"num_scales": 16}], [{"num_scales": 16}, {"num_scales": 4}]):
        assert parts(context=4, layer_settings=own)[part] == pytest.approx((few + many) / 2)


def test_every_layer_is_counted_with_its_own_window() -> None:
    wide = parts(context=4)
    some = parts(context=4, layer_settings=[{}, {"sliding_window": 0}, {"sliding_window": 0}])
    assert some["local attention"] == pytest.approx(wide["local attention"] / 3)
    # One halo for all: that of the widest.
    assert some["halos"] == wide["halos"]
    assert parts(context=4, sliding_window=0)["halos"] < wide["halos"]


def test_every_layer_is_counted_with_its_own_memory() -> None:
    whole, half = parts(), parts(layer_memories=["vort", "softmax"])
    assert half["retention"] == pytest.approx(whole["retention"] / 2)
    assert whole["full attention"] == 0 < half["full attention"]
    longer = parts(2**16, layer_memories=["softmax", "vort"])
    assert longer["full attention"] == pytest.approx(4 * half["full attention"])
    assert longer["retention"] == pytest.approx(2 * half["retention"])
    assert parts(layer_memories=["vort", "none"])["retention"] == half["retention"]
    kept = parts(layer_memories=["softmax"], softmax_cache_size=1024)["full attention"]
    assert kept < 2 * half["full attention"] / 10


def test_full_attention_is_not_cut_over_ranks() -> None:
    costs, options = Costs.load(), {"memory": 80e9, "bandwidth": 50e9}
    settings = {**PLAN_SIZES["1.3b"], "layer_memories": ["vort", "softmax"]}
    assert arrange(Shape.of(**settings), 8, 2**20, costs, **options) is None
    assert arrange(Shape.of(**PLAN_SIZES["1.3b"]), 8, 2**20, costs, **options) is not None
