"""The table of wrong lines fits the code: each stands in its file once, beside tests that exist."""

import pytest

from tests.mutations import MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_wrong_line_has_its_one_place(mutation: Mutation) -> None:
    text = (ROOT / "src" / "vort" / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1
    assert mutation.new != mutation.old
    assert all((ROOT / path.partition("::")[0]).exists() for path in mutation.tests.split())
