"""The search for settings: fair, in stages, on validation data, and nobody takes another's."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import log
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lab.experiments.tiny import CONFIG, TASK, tiny
from vort.lab.experiments import EXPERIMENTS
from vort.lab.experiments import search as search_module
from vort.lab.experiments.cell import SIZES, Cell, RunFolder, Size
from vort.lab.experiments.models import MODELS
from vort.lab.experiments.recall import recall_cell, recall_table
from vort.lab.experiments.run import Pace, run_cells
from vort.lab.experiments.search import (
    EARLIER,
    FILE,
    PLANNED,
    RATES,
    SEED,
    Choice,
    RowSearch,
    append,
    choice_of,
    chosen_in,
    collect,
    known_scores,
    line_of,
    model_settings,
    read_lines,
    row_searches,
    searched,
)

PILOT = EXPERIMENTS["pilot"]
Bits = Callable[[Cell], float | None]


def of_row(row: str, size: Size = "paper") -> RowSearch:
    (found,) = row_searches(PILOT, size, [row])
    return found


# All cells of a table are made for the one of a row.
quickly_of_row = cache(of_row)


def walk(search: RowSearch, bits: Bits) -> list[Cell]:
    """All trials of a search, in the order they come, when each comes to what `bits` says."""
    scores: dict[str, float | None] = {}
    done: list[Cell] = []
    while following := search.next(scores):
        done += following
        scores |= {cell.fingerprint: bits(cell) for cell in following}
        assert len(done) < 100
    assert search.finished(scores) == len(done) == len(scores)
    assert search.stage(scores) == 0
    return done


def rate(cell: Cell) -> float:
    value: float = cell.training["learning_rate"]
    return value


def of_stage(cells: list[Cell], stage: int) -> list[Cell]:
    return [cell for cell in cells if cell.tags["stage"] == stage]


def test_rates_lie_evenly_between_the_two_ends() -> None:
    assert (len(RATES), RATES[0], RATES[-1]) == (7, 3e-4, 1e-2)
    steps = [high / low for low, high in pairwise(RATES)]
    assert max(steps) / min(steps) < 1.05


@pytest.mark.parametrize("size", SIZES)
def test_every_row_gets_the_same_number_of_trials_of_the_same_lengths(size: Size) -> None:
    budgets = set()
    for search in row_searches(PILOT, size):
        full = search.cell.training["steps"]
        # The best is in the middle of every range: nothing lies beyond an edge, but for rates on
        # either side that no trial of full length has had.
        cells = walk(search, from_the_middle)
        shares = (round(full / 16), round(full / 4), full)
        assert [c.training["steps"] for c in cells] == [
            shares[c.tags["stage"] - 1] for c in cells
        ], search.row
        planned = [cell for cell in cells if not cell.search]
        budgets.add(tuple(len(of_stage(planned, stage)) for stage in (1, 2, 3)))
        further = [cell for cell in cells if cell.search]
        assert {cell.tags["stage"] for cell in further} == {3}
        assert len(further) <= 2
        assert {cell.seed for cell in cells} == {cell.task["seed"] for cell in cells} == {SEED}
        assert {cell.training["test_sequences"] for cell in cells} == {0}
        assert not any(cell.after for cell in cells)
    assert budgets == {PLANNED} == {(7, 3, 2)}


def from_the_middle(cell: Cell) -> float:
    """Bits that are lowest amid all ranges, and rise with the distance in the logarithm."""
    found = abs(log(rate(cell) / RATES[3]))
    if cell.config.get("memory") == "exponential":
        values = sorted(1 / (share * cell.task["length"]) for share in PILOT.decays[cell.size])
        found += abs(log(cell.config["exponential_rate"] / values[1]))
    if cell.config.get("memory") == "mixture":
        found += abs(log(cell.config["horizon"] / (0.3 * cell.task["length"])))
    return found


def test_no_seed_of_a_table_is_the_searchs() -> None:
    for experiment in EXPERIMENTS.values():
        for size in SIZES:
            for cell in experiment.cells(size, Path("somewhere")):
                assert cell.seed < SEED
                assert cell.task.get("seed", 0) < SEED


def test_decays_are_searched_within_the_same_budget() -> None:
    exponential = of_stage(walk(of_row("exponential"), lambda cell: rate(cell)), 1)[:7]
    decays = [cell.config["exponential_rate"] for cell in exponential]
    assert {1 / (share * 10_000) for share in PILOT.decays["paper"]} == set(decays)
    mixture = of_stage(walk(of_row("mixture"), lambda cell: rate(cell)), 1)[:7]
    assert {cell.config["horizon"] for cell in mixture} == {1000, 3000, 10_000, 30_000}
    assert len({rate(cell) for cell in mixture}) >= 4
    # Those that came second were tried at the best rate of the first.
    assert {rate(cell) for cell in mixture[4:]} == {min(map(rate, mixture[:4]))}
    # Free writes choose where their rates lie as a mixture does; a power law's are given.
    free, plain = (walk(of_row(row), lambda cell: rate(cell)) for row in ("vort_free", "vort"))
    horizons = {cell.config["horizon"] for cell in of_stage(free, 1)[:7]}
    assert horizons == {1000, 3000, 10_000, 30_000}
    assert {cell.config["horizon"] for cell in plain} == {10_000}


@settings(max_examples=60, deadline=None)
@given(data=st.data(), row=st.sampled_from(["vort", "mixture", "exponential"]))
def test_each_stage_goes_on_with_the_best_of_the_one_before(data: Any, row: str) -> None:
    scores: dict[str, float] = {}

    def bits(cell: Cell) -> float:
        return scores.setdefault(cell.fingerprint, data.draw(st.floats(0, 4)) + 1e-6 * len(scores))

    cells = walk(quickly_of_row(row), bits)

    def settings_of(cell: Cell) -> str:
        return str(cell.tags["trial"])

    for stage, kept in ((1, 3), (2, 2)):
        before = sorted(of_stage(cells, stage), key=bits)
        after = of_stage(cells, stage + 1)
        planned = [cell for cell in after if not cell.search]
        assert [settings_of(c) for c in planned] == [settings_of(c) for c in before[:kept]]
    for stage in (1, 2, 3):
        members = of_stage(cells, stage)
        beyond = [cell for cell in members if cell.search]
        assert len(members) == PLANNED[stage - 1] + len(beyond)
        # An edge was the best when a trial beyond it was made, and is no longer at the end.
        best = min(members, key=bits)
        # At full length only what was tried at full length counts.
        upto = [rate(c) for c in cells if c.tags["stage"] <= stage < 3 or c.tags["stage"] == stage]
        if _rounds(beyond) < 5:
            assert min(upto) < rate(best) < max(upto)
    lines = [{**line(cell), "score": bits(cell)} for cell in cells]
    winner = min(of_stage(cells, 3), key=bits)
    assert searched(f"pilot/{row}", "paper", lines) == line(winner)["settings"]


def _rounds(beyond: list[Cell]) -> int:
    """How often a stage went beyond an edge."""
    return len({cell.search for cell in beyond})


def line(cell: Cell, **changes: Any) -> dict[str, Any]:
    """A trial as it stands in the file, but for its score."""
    words = (word.partition("=") for word in cell.tags["trial"].split(" "))
    return {
        "size": cell.size,
        "experiment": cell.experiment,
        "row": cell.model,
        "stage": cell.tags["stage"],
        "settings": {name: json.loads(value) for name, _, value in words},
        "fingerprint": cell.fingerprint,
        **changes,
    }


@pytest.mark.parametrize("low", [True, False])
def test_a_row_that_is_best_at_an_edge_is_searched_further(low: bool) -> None:
    best = 1e-4 if low else 0.05

    def bits(cell: Cell) -> float:
        return abs(log(rate(cell) / best))

    cells = walk(of_row("vort"), bits)
    found = [rate(cell) for cell in of_stage(cells, 1)]
    assert len(found) > len(RATES)
    edge = RATES[0] if low else RATES[-1]
    further = found[len(RATES) :]
    expected = [edge * (1.794 ** (-n if low else n)) for n in range(1, len(further) + 1)]
    assert further == pytest.approx(expected, rel=0.05)
    # It stops one value past the best.
    assert sorted(found, key=lambda r: abs(r - best))[0] not in (min(found), max(found))
    numbers = [cell.search for cell in of_stage(cells, 1) if cell.search]
    assert numbers == [f"beyond the edge, {n}" for n in range(1, len(further) + 1)]


def test_at_full_length_the_next_rates_are_tried_whatever_short_trials_said() -> None:
    def bits(cell: Cell) -> float:
        # Short trials like a high rate, whole ones a low one.
        best = RATES[1] if cell.tags["stage"] == 3 else RATES[5]
        return abs(log(rate(cell) / best))

    whole = [rate(cell) for cell in of_stage(walk(of_row("vort"), bits), 3)]
    assert whole[2:] == [RATES[4], RATES[3], RATES[2], RATES[1], RATES[0]]


def test_a_rate_that_all_of_full_length_have_is_held_against_both_its_neighbours() -> None:
    def bits(cell: Cell) -> float:
        return 10 * abs(log(rate(cell) / 3e-3)) + cell.config["horizon"] / 1e6

    whole = of_stage(walk(of_row("mixture"), bits), 3)
    (planned,) = {rate(cell) for cell in whole if not cell.search}
    assert len(whole) == 4
    assert sorted({rate(cell) for cell in whole})[1] == planned


def test_rates_that_are_named_are_tried_in_full_and_what_lies_beyond_them() -> None:
    (plain,) = row_searches(PILOT, "paper", ["vort"], rates=RATES[2:5])
    (staged,) = row_searches(PILOT, "paper", ["vort"])
    # The same trials as the search in stages has, which are not done twice.
    assert plain.trial(3, {"learning_rate": RATES[3]}) == staged.trial(
        3, {"learning_rate": RATES[3]}
    )
    cells = walk(plain, lambda cell: abs(log(rate(cell) / RATES[5])))
    assert {cell.tags["stage"] for cell in cells} == {3}
    assert [rate(cell) for cell in cells] == list(RATES[2:7])
    assert [bool(cell.search) for cell in cells] == [False] * 3 + [True] * 2
    assert plain.planned() == 3
    (mixture,) = row_searches(PILOT, "paper", ["mixture"], rates=RATES[2:5])
    decays = {cell.config["horizon"] for cell in mixture.next({})}
    assert decays == {(searched("pilot/mixture", "paper") or {})["horizon"]}


def test_with_several_seeds_every_setting_has_a_trial_on_each_and_their_mean_decides() -> None:
    (search,) = row_searches(PILOT, "paper", ["vort"], rates=RATES[2:5], seeds=3)
    (single,) = row_searches(PILOT, "paper", ["vort"], rates=RATES[2:5])
    assert search.planned() == 9

    def bits(cell: Cell) -> float:
        # The first seed alone likes the highest rate.
        best = RATES[4] if cell.seed == SEED else RATES[3]
        return abs(log(rate(cell) / best))

    cells = walk(search, bits)
    assert {(rate(cell), cell.seed) for cell in cells} == {
        (each, SEED + n) for each in RATES[2:5] for n in range(3)
    }
    assert all(cell.task["seed"] == cell.seed for cell in cells)
    # What one seed has done is not done again.
    assert {c.fingerprint for c in single.next({})} < {c.fingerprint for c in cells}
    assert RATES[5] in {rate(cell) for cell in walk(single, bits)}
    # Beyond an edge there are as many; one trial that breaks down takes its rate out.
    further = walk(search, lambda cell: 1 / rate(cell))
    assert sum(rate(cell) == RATES[5] for cell in further) == 3
    broken = walk(
        search, lambda c: None if (rate(c), c.seed) == (RATES[4], SEED + 2) else 1 / rate(c)
    )
    assert max(map(rate, broken)) == RATES[4]


def test_a_decay_at_its_edge_is_searched_further_too() -> None:
    cells = walk(of_row("exponential"), lambda cell: cell.config["exponential_rate"])
    rates = sorted({cell.config["exponential_rate"] for cell in of_stage(cells, 1)})
    assert rates[0] < 1 / (max(PILOT.decays["paper"]) * 10_000)


def test_bits_that_fall_for_ever_end_the_search_all_the_same() -> None:
    cells = walk(of_row("vort"), lambda cell: rate(cell))
    assert len(of_stage(cells, 1)) == len(RATES) + 5


def test_a_trial_that_broke_down_cannot_win_and_one_that_did_not_end_is_done() -> None:
    cells = walk(of_row("vort"), lambda cell: None if rate(cell) > 1e-3 else 1 / rate(cell))
    assert max(map(rate, of_stage(cells, 2))) < 1e-3
    assert walk(of_row("vort"), lambda cell: None) == of_row("vort").next({})
    search = of_row("vort")
    first = search.next({})
    scores = {cell.fingerprint: rate(cell) for cell in first[:-1]}
    assert search.next(scores) == first[-1:]


@pytest.mark.parametrize(
    ("row", "decay"),
    [("exponential", {"exponential_rate": 0.5}), ("mixture", {"horizon": 77}), ("vort", {})],
)
def test_a_search_asks_the_same_whatever_an_earlier_one_has_found(
    row: str, decay: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = walk(of_row(row), lambda cell: rate(cell))
    found = {"learning_rate": 0.123, **decay}
    monkeypatch.setattr("vort.lab.experiments.search.searched", lambda search, size: dict(found))
    assert of_row(row).cell.training["learning_rate"] == 0.123
    after = walk(of_row(row), lambda cell: rate(cell))
    assert [cell.fingerprint for cell in after] == [cell.fingerprint for cell in before]


def test_the_deepest_stage_decides_and_within_it_the_lowest_bits() -> None:
    def at(stage: int | None, learning_rate: float, score: float | None, of: str = "a") -> Any:
        place = {"size": "paper", "experiment": "pilot", "row": "vort", "of": of}
        what = {"stage": stage, "settings": {"learning_rate": learning_rate}, "score": score}
        return {**place, **what, **({"search": EARLIER} if stage is None else {})}

    early = [at(None, 1.0, 0.5), at(None, 2.0, 0.1)]
    lines = [*early, at(1, 3.0, 0.01)]
    assert searched("pilot/vort", "paper", early) == {"learning_rate": 2.0}
    assert chosen_in("pilot/vort", "paper", early) == EARLIER
    assert searched("pilot/vort", "paper", lines) == {"learning_rate": 3.0}
    lines += [at(3, 4.0, 0.3), at(3, 5.0, 0.2), at(3, 6.0, None), at(2, 7.0, 0.01)]
    assert searched("pilot/vort", "paper", lines) == {"learning_rate": 5.0}
    assert chosen_in("pilot/vort", "paper", lines) == "stage 3"
    # Nobody takes another's: not of another row, table or size.
    for name in ("pilot/vort_paper", "label_copy/vort", "books/vort"):
        assert searched(name, "paper", lines) is None
    assert searched("pilot/vort", "laptop", lines) is None
    # A row that was defined anew counts as it was defined last.
    lines.append(at(1, 8.0, 3.0, of="b"))
    assert searched("pilot/vort", "paper", lines) == {"learning_rate": 8.0}


def test_the_lowest_mean_of_those_tried_on_most_seeds_wins() -> None:
    def at(learning_rate: float, seed: int, score: float | None) -> Any:
        place = {"size": "paper", "experiment": "pilot", "row": "vort", "of": "a", "steps": 7}
        what = {"stage": 3, "settings": {"learning_rate": learning_rate}, "seed": seed}
        return {**place, **what, "score": score}

    once = [at(1.0, 100, 0.5), at(2.0, 100, 0.1), at(3.0, 100, 0.2), at(4.0, 100, 0.3)]
    assert searched("pilot/vort", "paper", once) == {"learning_rate": 2.0}
    lines = [*once, at(2.0, 101, 0.9), at(3.0, 101, 0.4)]
    assert searched("pilot/vort", "paper", lines) == {"learning_rate": 3.0}
    # Held against those of as many seeds: 1 and 4 say nothing of the second.
    assert choice_of("pilot/vort", "paper", lines) == Choice(3, 6, 7, True, 2)
    lines += [at(1.0, 101, 0.6), at(4.0, 101, None)]
    assert choice_of("pilot/vort", "paper", lines) == Choice(3, 8, 7, False, 2)
    # What breaks down on a third seed leaves the choice to those with two.
    lines += [at(3.0, 102, None)]
    assert searched("pilot/vort", "paper", lines) == {"learning_rate": 2.0}
    assert choice_of("pilot/vort", "paper", lines) == Choice(3, 9, 7, False, 2)


def test_what_was_given_up_is_kept_and_never_taken() -> None:
    lines = read_lines()
    given_up = [line for line in lines if line.get("search") == f"{EARLIER}, given up"]
    assert given_up
    assert all(searched(f"{x['experiment']}/{x['row']}", x["size"], [x]) is None for x in given_up)


def test_the_file_of_trials_is_whole_and_says_what_each_was() -> None:
    lines = read_lines()
    assert len(lines) >= 238
    for each in lines:
        assert {"size", "experiment", "row", "stage", "settings", "seed", "steps", "score"} <= set(
            each
        )
        assert each["seed"] >= SEED
        assert each["experiment"] in EXPERIMENTS
        if each["stage"] is not None:
            assert {"commit", "dirty", "command", "device", "versions", "code"} <= set(each)
    prints = [each["fingerprint"] for each in lines if "fingerprint" in each]
    assert len(prints) == len(set(prints))


def trial_of(search: RowSearch, number: int, stage: int = 1) -> Cell:
    """A trial that takes a second."""
    cell = search.trial(stage, {"learning_rate": RATES[number]})
    return replace(
        cell,
        config=CONFIG,
        task={**TASK, "seed": SEED},
        training={**cell.training, "steps": 2, "batch_size": 4},
    )


def test_trials_start_from_the_same_weights_and_never_see_the_test_split(tmp_path: Path) -> None:
    cells = [trial_of(of_row("vort", "laptop"), number) for number in (0, 6)]
    folder = RunFolder(tmp_path)
    assert not [outcome.error for outcome in run_cells(cells, folder) if outcome.error]
    first, second = (folder.read(cell) for cell in cells)
    assert first is not None
    assert second is not None
    assert "test" not in first
    # The first loss is that of the weights alone: a rate has not told yet.
    assert first["history"][0]["loss"] == pytest.approx(second["history"][0]["loss"], rel=0.2)
    assert first["validation"] != second["validation"]
    assert list(run_cells(cells, folder)) == []


def test_a_folder_of_trials_is_taken_up_once_and_nothing_is_removed(tmp_path: Path) -> None:
    file, search = tmp_path / "trials.jsonl", of_row("vort", "laptop")
    file.write_text(FILE.read_text())
    before = read_lines(file)
    folder = RunFolder(tmp_path / "run")
    cells = [trial_of(search, number) for number in (1, 2)]
    assert not [outcome.error for outcome in run_cells(cells, folder) if outcome.error]
    assert collect(tmp_path / "run", file) == 2
    assert collect(tmp_path / "run", file) == 0
    after = read_lines(file)
    assert after[: len(before)] == before
    new = after[len(before) :]
    assert [each["settings"] for each in new] == [{"learning_rate": RATES[n]} for n in (1, 2)]
    for each in new:
        assert (each["seed"], each["stage"], each["share"], each["steps"]) == (SEED, 1, 0.0625, 2)
        assert each["score"] == each["bits"]["all"]
        assert each["commit"]
        assert each["versions"]["torch"]
        assert each["of"] == new[0]["of"]
    # Both are known afterwards, from the folder and from the file, and not done again.
    scores = known_scores([search], folder, before)
    assert scores == known_scores([search], RunFolder(tmp_path / "none"), after)
    assert {cell.fingerprint for cell in cells} <= set(scores)


def test_a_row_for_long_lags_is_judged_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = of_row("vort").next({})[0]
    scores = {"<=1": 1.0, ">1": 3.0, "all": 2.0}
    record = {
        "experiment": "pilot",
        "scale": "paper",
        "cell": cell.coordinates(),
        "fingerprint": "x",
        "task": {"length": 10},
        "model": {},
        "training": {"batch_size": 2},
        "validation": {name: {"bits": bits} for name, bits in scores.items()},
        "made_by": {},
    }
    assert (line_of(record)["score"], line_of(record)["judged"]) == (2.0, "all")
    monkeypatch.setitem(search_module.MODELS, "vort", SimpleNamespace(judged_by="long"))
    assert (line_of(record)["score"], line_of(record)["judged"]) == (3.0, ">1")


def test_bad_searches_are_explained() -> None:
    with pytest.raises(ValueError, match=r"share must lie in \(0, 0.25\], got 2"):
        row_searches(PILOT, "laptop", share=2)
    with pytest.raises(ValueError, match=r"rows must be of vort, .*got dream"):
        row_searches(PILOT, "laptop", ["dream"])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_cell_says_whose_search_it_uses_and_has_what_that_found(name: str, size: Size) -> None:
    for cell in EXPERIMENTS[name].cells(size, Path("somewhere")):
        if not cell.search:
            continue
        found = searched(cell.search, size)
        assert found is not None
        assert cell.training["learning_rate"] == found["learning_rate"]
        experiment, _, row = cell.search.partition("/")
        if name == experiment:
            # Its own, or those of the one row that it names as its kin.
            assert row in (cell.model, MODELS[cell.model].kin)
            if row == cell.model:
                own = {k: v for k, v in found.items() if k != "learning_rate"}
                assert {k: cell.config[k] for k in own} == own
            else:
                assert searched(f"{name}/{cell.model}", size) is None


def test_an_unknown_task_or_row_takes_nobodys_rates() -> None:
    task = {"name": "mqar", "length": 256}
    new = recall_cell("mqar", "laptop", "vort", 0, task)
    assert (new.search, new.training["learning_rate"]) == ("", 4e-3)
    row = recall_cell("pilot", "laptop", "vort_new", 0, task, settings={})
    assert (row.search, row.training["learning_rate"]) == ("", 4e-3)
    like = recall_cell("mqar", "laptop", "vort", 0, task, search="pilot/vort")
    assert (like.search, like.training["learning_rate"]) == ("pilot/vort", 6e-3)
    exponential = recall_cell("mqar", "laptop", "exponential", 0, task)
    assert exponential.config["exponential_rate"] == 10 / 256


def test_a_decay_that_was_searched_is_the_one_that_is_trained_with() -> None:
    found = searched("pilot/exponential", "laptop")
    assert found is not None
    cell = next(c for c in PILOT.cells("laptop", None) if c.model == "exponential")
    assert cell.config["exponential_rate"] == found["exponential_rate"] == 0.01


def test_a_decay_goes_to_a_row_that_has_one() -> None:
    found = {"learning_rate": 1.0, "exponential_rate": 0.5, "horizon": 7}
    fixed = {"memory": "exponential", "learn_rates": False}
    assert model_settings(found, fixed, own=False) == {"exponential_rate": 0.5}
    learned = {"memory": "exponential"}
    assert model_settings(found, learned, own=True) == {"exponential_rate": 0.5}
    assert model_settings(found, learned, own=False) == {}
    assert model_settings(found, {"memory": "mixture"}, own=False) == {"horizon": 7}
    assert model_settings(found, {}, own=True) == {}
    free = {"write_gain": "scale"}
    assert model_settings(found, free, own=True) == {"horizon": 7}
    assert model_settings(found, free, own=False) == {}


def test_a_new_table_can_be_searched_too() -> None:
    mine = recall_table(
        "mine",
        "Mine",
        "A test.",
        heading="Mine",
        task={"laptop": {"name": "mqar", "length": 64, "pairs": 8}},
        models={"laptop": ("vort", "exponential")},
    )
    assert [len(search.next({})) for search in row_searches(mine, "laptop")] == [7, 7]


def test_pace_reckons_with_a_rows_own_speed_and_else_with_the_slowest() -> None:
    pace, cell = Pace(), tiny(training={"steps": 100, "batch_size": 4})
    assert pace.seconds(cell) == 0.0
    record = {
        "experiment": "pilot",
        "cell": {"model": "mixture"},
        "task": {"length": 50},
        "training": {"batch_size": 4},
        "steps": 10,
        "tokens_per_second": 100,  # two seconds a step
        "seconds": 25.0,
    }
    pace.learn(record)
    assert pace.seconds(cell) == pytest.approx(100 * 2 + 5)
    pace.learn({**record, "cell": {"model": "vort"}, "tokens_per_second": 200, "seconds": 17.0})
    assert pace.seconds(cell) == pytest.approx(100 * 1 + 7)
    pace.learn({"experiment": "pilot", "cell": {"model": "vort"}})  # says nothing
    assert pace.seconds(cell) == pytest.approx(107)


def test_no_one_can_take_a_line_twice(tmp_path: Path) -> None:
    file = tmp_path / "trials.jsonl"
    assert append([{"fingerprint": "a"}, {"fingerprint": "a"}, {"fingerprint": "b"}], file) == 2
    assert append([{"fingerprint": "b"}, {"fingerprint": "c"}], file) == 1
    assert [each["fingerprint"] for each in read_lines(file)] == ["a", "b", "c"]
    assert search_module.FILE.name == "trials.jsonl"
