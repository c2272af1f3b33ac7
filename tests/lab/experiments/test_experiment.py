"""Other settings, other cells; and a table of one file and one line that appears everywhere."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from tests.lab.experiments.tiny import tiny
from vort.lab.experiments import EXPERIMENTS
from vort.lab.experiments.cell import RunFolder
from vort.lab.experiments.recall import recall_table
from vort.lab.experiments.run import run_cells
from vort.lab.tasks import TASKS
from vort.lab.tasks.task import GeneratedTask, Row

PILOT = EXPERIMENTS["pilot"]


def test_a_changed_cell_has_a_name_a_fingerprint_and_a_row_of_its_own() -> None:
    cell = tiny(search="pilot/vort")
    other = PILOT.changed(
        cell, {"training.learning_rate": 0.5, "model.num_scales": 2, "task.length": 32}
    )
    assert other.training["learning_rate"] == 0.5
    assert other.config["num_scales"] == 2
    assert other.task["length"] == 32
    assert other.search == ""
    assert other.id != cell.id
    assert other.fingerprint != cell.fingerprint
    assert other.coordinates()["set"] == (
        "model.num_scales=2 task.length=32 training.learning_rate=0.5"
    )
    assert PILOT.changed(cell, {"model.num_scales": 2}).search == "pilot/vort"


def test_no_two_changes_share_a_file() -> None:
    values = [4, "4", "a b", "a_b", "x" * 300, "x" * 301, [1, 2], None, 1e-3]
    ids = {PILOT.changed(tiny(), {"training.log": value}).id for value in values}
    assert len(ids) == len(values)
    assert all(len(name) < 200 for name in ids)


def test_epochs_take_the_place_of_steps() -> None:
    assert "steps" not in PILOT.changed(tiny(), {"training.epochs": 2}).training


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("training.learning_rat", r"did you mean training\.learning_rate\?"),
        ("model.num_scale", r"did you mean model\.num_scales\?"),
        ("task.lenght", r"did you mean task\.length\?"),
        ("learning_rate", r"did you mean training\.learning_rate\?"),
        ("training.seed", "has no setting"),
    ],
)
def test_unknown_settings_are_refused_with_a_hint(name: str, hint: str) -> None:
    with pytest.raises(TypeError, match=hint):
        PILOT.changed(tiny(), {name: 1})


def test_a_cell_that_measures_has_the_settings_that_it_measures_with() -> None:
    plasticity, complexity = EXPERIMENTS["plasticity"], EXPERIMENTS["complexity"]
    (cell,) = plasticity.cells("laptop", None)
    assert plasticity.changed(cell, {"training.weight": 2.0}).training["weight"] == 2.0
    with pytest.raises(TypeError, match=r"plasticity, as vort, has no setting 'model.num_scales'"):
        plasticity.changed(cell, {"model.num_scales": 2})
    layer = complexity.cells("laptop", None)[0]
    assert complexity.changed(layer, {"training.repeats": 1}).training["repeats"] == 1
    with pytest.raises(TypeError, match=r"has no setting 'training\.learning_rate'"):
        complexity.changed(layer, {"training.learning_rate": 1e-3})


def test_changed_cells_are_kept_beside_the_others_and_found_again(tmp_path: Path) -> None:
    folder, cell = RunFolder(tmp_path), tiny()
    other = PILOT.changed(cell, {"model.memory": "mixture"})
    assert not [o.error for o in run_cells([cell, other], folder) if o.error]
    assert folder.finished(cell)
    (found,) = folder.changed("pilot", "laptop")
    assert found["model"]["memory"] == "mixture"
    assert list(folder.changed("pilot", "paper")) == []
    assert list(folder.changed("pilot", "laptop", share=0.5)) == []


def test_a_task_with_a_table_is_one_file_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from vort.cli import app

    @dataclass(frozen=True, kw_only=True)
    class Echo(GeneratedTask):
        """The first token, asked for at the end."""

        name: ClassVar[str] = "echo"
        vocab_size: ClassVar[int] = 4
        length: int = 16

        def draw(self, rng: np.random.Generator) -> Row:
            tokens = rng.integers(4, size=self.length)
            last = np.array([self.length - 1])
            return Row(tokens, last, tokens[:1], np.array([0]))

    sizes = {"validation_sequences": 4, "test_sequences": 4, "bounds": (4,)}
    table = recall_table(
        "echo",
        "Echo (no table of the paper)",
        "The first token, asked for at the end.",
        heading="Echo: accuracy (%) by lag",
        task={"laptop": {"name": "echo", **sizes}},
        models={"laptop": ("vort", "mixture")},
        seeds=(0,),
    )
    monkeypatch.setitem(EXPERIMENTS, "echo", table)
    arguments = ["reproduce", "--only", "echo", "--share", "0.02", "--workers", "1"]
    try:
        result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)])
    finally:
        del TASKS["echo"]
    assert result.exit_code == 0, result.output
    assert "not searched" in (tmp_path / "echo" / "summary.json").read_text()
    assert "Echo (no table of the paper)" in (tmp_path / "report.html").read_text()
