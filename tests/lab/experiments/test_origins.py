"""Tables say how their rows were made, and what was replaced stays in sight."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.lab.experiments.test_scores import ACCURACY, record
from vort.lab.experiments import EXPERIMENTS
from vort.lab.experiments.cell import RunFolder
from vort.lab.experiments.experiment import Summary
from vort.lab.experiments.origins import history_sheet, rates_note, with_origins
from vort.lab.experiments.scores import score_sheet
from vort.lab.experiments.summary import _marked, summarise
from vort.lab.report.tables import Sheet
from vort.lab.training.metrics import interval
from vort.lab.verdicts import Claim


def made(model: str, code: str | None, commit: str, seed: int = 0) -> dict[str, Any]:
    made_by = {"commit": commit, "dirty": False, **({} if code is None else {"code": code})}
    return {**record(model, seed, 0.5), "made_by": made_by}


def origins(
    records: list[dict[str, Any]], other: tuple[str, ...] = ()
) -> tuple[Sequence[Sheet], str]:
    summary = Summary([score_sheet("title", records, ["a", "b"], ACCURACY)])
    found = with_origins(summary, "pilot", records, {"pilot": other})
    return found.sheets, " ".join(found.notes)


def test_commits_of_cells_are_told_row_by_row_where_versions_differ() -> None:
    same = [made("vort", "x", "aaaaaaaaa"), made("mixture", "x", "bbbbbbbbb")]
    sheets, notes = origins(same)
    assert (len(sheets), notes) == (1, "Cells: commits aaaaaaa, bbbbbbb.")
    sheets, notes = origins([*same, made("vort", "y", "ccccccccc", seed=1)])
    assert [list(row) for row in sheets[-1].rows] == [
        ["VORT (ours)", "aaaaaaa (A): 0; ccccccc (B): 1"],
        ["Mixture-5", "bbbbbbb (A)"],
    ]
    sheets, _ = origins([*same, made("exponential", None, "")])
    assert list(sheets[-1].rows[-1]) == ["Exponential", "before commits were kept (B)"]


def test_cells_of_other_experiments_do_not_stand_among_its_own() -> None:
    own, other = made("vort", "x", "aaaaaaaaa"), made("vort", "y", "ccccccccc")
    sheets, notes = origins([own, {**other, "experiment": "decoding"}])
    assert (len(sheets), notes) == (1, "Cells: commit aaaaaaa. Cells of decoding: commit ccccccc.")


def test_changed_files_and_other_settings_are_named_too() -> None:
    dirty = made("vort", "x", "aaaaaaaaa")
    dirty["made_by"]["dirty"] = True
    sheets, notes = origins([dirty, made("mixture", "x", "aaaaaaaaa")], ("mixture",))
    assert [row[0] for row in sheets[0].rows] == ["VORT (ours)", "Mixture-5 ‡"]
    assert "aaaaaaa with changes" in notes
    assert "‡ made with other settings than are planned now: Mixture-5." in notes


def test_a_namesake_of_another_experiment_is_told_of_and_not_marked() -> None:
    records = [made("vort", "x", "aaaaaaaaa"), made("mixture", "x", "aaaaaaaaa")]
    sheet = score_sheet("title", records, ["a", "b"], ACCURACY)
    lead = Claim("ours", "VORT leads", "by 3 points", "holds", rows=("vort", "mixture"))
    found = with_origins(Summary([sheet], [lead]), "pilot", records, {"books": ["mixture"]})
    assert [line[0] for line in found.sheets[0].rows] == ["VORT (ours)", "Mixture-5"]
    assert [claim.verdict for claim in found.verdicts] == ["holds"]
    assert "Of books, made with other settings than are planned now: Mixture-5." in found.notes


def test_a_row_of_another_experiment_is_marked_where_it_has_no_namesake_of_its_own() -> None:
    own = {**made("vort", "x", "aaaaaaaaa"), "experiment": "books_deep"}
    wide = [
        {**made(row, "x", "aaaaaaaaa"), "experiment": "books_deeper"} for row in ("vort", "gla")
    ]
    experiment, shown = EXPERIMENTS["books_deep"], [own, *wide]
    assert _marked(experiment, {"books_deeper": ["vort", "gla", "none"]}, shown) == {
        "books_deeper": ["vort"],
        "books_deep": ["gla"],
    }
    assert _marked(experiment, {"books_deep": ["vort"]}, shown) == {"books_deep": ["vort"]}


def test_a_row_as_planned_decides_nothing_against_one_of_other_settings() -> None:
    records = [made("vort", "x", "aaaaaaaaa"), made("mixture", "x", "aaaaaaaaa")]
    sheet = score_sheet("title", records, ["a", "b"], ACCURACY)
    lead = Claim("ours", "VORT leads", "by 3 points", "holds", rows=("vort", "mixture"))
    summary = Summary([sheet], [lead, replace(lead, rows=())])

    def verdicts(*other: str) -> list[str]:
        return [
            claim.verdict
            for claim in with_origins(summary, "pilot", records, {"pilot": other}).verdicts
        ]

    assert verdicts() == ["holds", "holds"]
    assert verdicts("mixture") == ["undecided", "holds"]
    assert verdicts("vort", "mixture") == ["holds", "holds"]  # both of the same plan
    (claim, _) = with_origins(summary, "pilot", records, {"pilot": ("mixture",)}).verdicts
    assert "before Mixture-5 has the settings planned now" in claim.measured


def test_a_row_searched_at_full_length_decides_nothing_against_one_that_was_not() -> None:
    def searched_in(model: str, stage: str, rate: float) -> dict[str, Any]:
        whose = {"searched": f"books_deep/{model}", "searched_in": stage, "scale": "paper"}
        return {**made(model, "x", "aaaaaaaaa"), **whose, "training": {"learning_rate": rate}}

    # A rate that is not the best by now was chosen in the stage that the cell says.
    records = [searched_in("vort", "stage 3", 0.5), searched_in("mixture", "stage 2", 0.5)]
    lead = Claim("ours", "VORT leads", "by 3 points", "holds", rows=("vort", "mixture"))
    summary = Summary([score_sheet("title", records, ["a", "b"], ACCURACY)], [lead])
    (claim,) = with_origins(summary, "pilot", records, {}).verdicts
    assert claim.verdict == "undecided"
    assert "before rates of Mixture-5 were tried at full length too" in claim.measured
    assert "none of them of full length. Short ones: Mixture-5." in rates_note(records)
    both = [records[0], searched_in("mixture", "stage 3", 0.5)]
    (claim,) = with_origins(summary, "pilot", both, {}).verdicts
    assert claim.verdict == "holds"


def test_a_row_with_the_rate_of_another_says_whose_it_is() -> None:
    def with_rate_of(model: str, whose: str) -> dict[str, Any]:
        return {**made(model, "x", "aaaaaaaaa"), "searched": whose, "searched_in": "stage 3"}

    own = with_rate_of("mixture", "pilot/mixture")
    others = [with_rate_of("vort", "pilot/mixture"), with_rate_of("exponential", "books/gla")]
    experiment = {"experiment": "pilot", "training": {"learning_rate": 0.5}}
    records = [{**record, **experiment} for record in (own, *others)]
    assert "Found for another row" not in rates_note(records[:1])
    told = "Found for another row: VORT (ours): for Mixture-5. Exponential: for GLA in books."
    assert told in rates_note(records)


def past(seed: int, value: float, reason: str) -> dict[str, Any]:
    return {
        **made("mixture", None, ""),
        "cell": {"task": "zipf_retrieval", "model": "mixture", "beta": 1.0, "seed": seed},
        "test": {"near": {"accuracy": 1.0}, "far": {"accuracy": value}, "all": {"accuracy": 1.0}},
        "validation": {"all": {"bits": 0.088}},
        "training": {"learning_rate": 2e-3},
        "steps": 3125,
        "replaced": {"reason": reason},
    }


def test_the_history_shows_what_stood_there_and_why_it_went() -> None:
    today = [past(seed, 0.828, "") for seed in range(2)]
    assert history_sheet([], today) is None
    sheet = history_sheet([past(0, 0.916, "searched anew"), past(1, 0.9, "")], today)
    assert sheet is not None
    assert [list(row) for row in sheet.rows] == [
        [
            *("Mixture-5, beta 1.0", "3,125 at 0.002", "0.088", "91.6", "82.8"),
            *("before commits were kept", "searched anew"),
        ],
        [
            *("Mixture-5, beta 1.0", "3,125 at 0.002", "0.088", "90.0", "82.8"),
            *("before commits were kept", "no reason was given"),
        ],
    ]


def test_the_history_is_held_against_cells_of_its_own_experiment() -> None:
    """Table books_deep also reads the wider models, whose rows have the same names."""
    folder = RunFolder(Path(__file__).parents[3] / "results" / "paper")
    experiment = EXPERIMENTS["books_deep"]
    sheet = summarise(experiment, folder, "paper").summary.sheets[-1]
    assert sheet.title == "Results that were replaced"
    cells = [folder.read(c) for c in experiment.cells("paper", Path("b")) if c.model == "vort"]
    scores = [
        [each["bits"] for name, each in c["test"].items() if name != "all"] for c in cells if c
    ]
    now = interval([bits[-1] for bits in scores])
    shown = [row[4] for row in sheet.rows if row[0] == "VORT (ours)"]
    assert shown[0] == f"{now.mean:.3f} ± {now.half:.3f}"  # others had fewer seeds


def test_the_records_own_losses_are_in_it() -> None:
    """The first full-length pilot, in which Mixture-5 led, as it was committed."""
    folder = RunFolder(Path(__file__).parents[3] / "results" / "paper")
    sheet = history_sheet(folder.history("pilot"), [])
    assert sheet is not None
    full = {row[0]: row for row in sheet.rows if row[1] == "3,125 at 0.002"}
    assert full["Mixture-5, beta 1.0"][2:4] == ["0.088", "91.6"]
    assert full["VORT (ours), beta 1.0"][3] == "89.4"
    assert "order_start" in full["Mixture-5, beta 1.0"][-1]
