"""Tables on the terminal, in Markdown and for a page."""

import pytest
from rich.text import Text

from vort.lab.report.tables import Entry, Sheet, grid
from vort.lab.verdicts import VERDICTS


def test_markdown_keeps_pipes_inside_their_cells() -> None:
    sheet = Sheet("T", ["a|b", "c"], [["1|2", "3"]])
    assert sheet.to_markdown() == "## T\n\n| a\\|b | c |\n| --- | --- |\n| 1\\|2 | 3 |\n"


@pytest.mark.parametrize("verdict", VERDICTS)
def test_verdicts_have_their_colour_on_the_terminal_with_an_erratum_or_not(verdict: str) -> None:
    sheet = Sheet("T", ["a"], [[verdict], [f"{verdict} (E1)"], ["[red]other[/red]"]])
    cells = list(sheet.to_rich().columns[0].cells)
    assert all(isinstance(cell, Text) for cell in cells)
    colours = {"good": "green", "fair": "yellow", "open": "cyan", "bad": "red"}
    colour = colours[VERDICTS[verdict]]
    assert [str(cell.style) for cell in cells] == [colour, colour, ""]
    assert str(cells[2]) == "[red]other[/red]"


def test_a_column_of_scores_counts_as_figures_and_one_of_chips_does_not() -> None:
    rows = [["x", Entry("93.0", half=" ± 0.4"), Entry("holds", "good"), 3, True]]
    assert grid(["", "score", "verdict", "seeds", "flag"], rows).figures == {1, 3}
