"""Spans become token indicators, for any tokenizer, looking ahead or not."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vort.layers.entity_probe import EntityProbe, LinearProbe, RuleProbe, entity_indicator

PIECES = (
    "Mr.|Anne|anne|O'Brien|Lincoln's|I|Paris—|the|. The|\"Now|é|said,|New|York|John-s|X'|-|\n\n|"
    "Élise|d’Or|’s|A"
)
PROSE = st.lists(st.sampled_from(PIECES.split("|")), max_size=25).map(" ".join)


class Fixed:
    """A probe that always says the same."""

    def __init__(self, *spans: tuple[int, int]) -> None:
        self.spans = list(spans)

    def probe(self, text: str) -> list[tuple[int, int]]:
        return self.spans


def bytes_of(text: str) -> list[tuple[int, int]]:
    return [(i, i + 1) for i, letter in enumerate(text) for _ in letter.encode()]


def test_a_token_is_marked_if_it_shares_a_character_with_a_name() -> None:
    offsets = [(0, 2), (2, 4), (4, 6), (3, 3), (0, 6), (0, 0)]
    assert entity_indicator("abcdef", offsets, Fixed((3, 4))).tolist() == [0, 1, 0, 0, 1, 0]


@given(st.text(max_size=30), st.data())
def test_overlap_agrees_with_its_definition(text: str, data: st.DataObject) -> None:
    spans = st.tuples(st.integers(0, len(text)), st.integers(0, len(text))).map(sorted).map(tuple)
    names = data.draw(st.lists(spans, max_size=4))
    tokens = data.draw(st.lists(spans, max_size=8))
    expected = [any(max(a, c) < min(b, d) for c, d in names) for a, b in tokens]
    assert entity_indicator(text, tokens, Fixed(*names)).tolist() == expected


def test_no_tokens_give_an_empty_indicator() -> None:
    assert entity_indicator("", []).shape == (0,)
    assert entity_indicator("", torch.zeros(3, 2, dtype=torch.long)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("probe", [RuleProbe(causal=True), LinearProbe.pretrained(causal=True)])
@given(text=PROSE)
def test_a_causal_indicator_never_changes_when_text_is_added(probe: EntityProbe, text: str) -> None:
    whole = entity_indicator(text, bytes_of(text), probe, causal=True)
    for length in range(len(text)):
        prefix = text[:length]
        part = entity_indicator(prefix, bytes_of(prefix), probe, causal=True)
        assert torch.equal(part, whole[: len(part)]), (prefix, text[length:])


def test_a_causal_mark_stands_where_the_name_is_known_to_be_over() -> None:
    text = "so Anne’s dog met Mr. O'Brien—and"
    marks = entity_indicator(text, bytes_of(text), RuleProbe(causal=True), causal=True)
    marked = [bytes_of(text)[int(i)][0] for i in marks.nonzero()]
    assert [text[i] for i in marked] == [" ", "—"]
    # The dash has three bytes; the last one completes it.
    assert [int(i) for i in marks.nonzero()][-1] == len(text[: marked[-1] + 1].encode()) - 1


def test_a_causal_mark_moves_on_where_white_space_has_no_token() -> None:
    marks = entity_indicator("then Mary sang", [(0, 4), (5, 9), (10, 14)], None, causal=True)
    assert marks.tolist() == [0, 0, 1]


def test_a_probe_that_looks_ahead_is_refused_where_that_is_forbidden() -> None:
    with pytest.raises(ValueError, match=r"never looks ahead.*got Fixed"):
        entity_indicator("a", [(0, 1)], Fixed((0, 1)), causal=True)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [([(0, 9)], r"0 <= start <= end <= 3.*got \(0, 9\) at index 0"), ([1, 2], "shape")],
)
def test_wrong_offsets_are_named(offsets: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        entity_indicator("abc", offsets, Fixed())
