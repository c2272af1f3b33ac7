"""A text as cells: tokens that share characters stand together, and nothing in them acts."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Cell", "cells_of", "visible"]


@dataclass(frozen=True)
class Cell:
    """The smallest piece of text with tokens of its own: a character, to a byte tokenizer.

    Attributes:
        shown: what to display, see `visible`.
        start: first character of the text.
        end: character after the last.
        first: first of its tokens.
        last: last of its tokens; its bytes are all read when this one is.
    """

    shown: str
    start: int
    end: int
    first: int
    last: int


def cells_of(text: str, offsets: Sequence[tuple[int, int]]) -> list[Cell]:
    """The cells of a tokenized text, in order; every token belongs to exactly one.

    Characters that the tokenizer dropped go with the token after them, trailing ones with the last.
    Tokens without characters (special ones) stand alone as "◇".

    >>> [(cell.shown, cell.first, cell.last) for cell in cells_of("né", [(0, 1), (1, 2), (1, 2)])]
    [('n', 0, 0), ('é', 1, 2)]
    """
    spans: list[list[int]] = []  # start, end, first, last
    reached = 0
    for token, (start, end) in enumerate(offsets):
        if end > start and spans and start < spans[-1][1]:
            spans[-1][1], spans[-1][3] = max(end, spans[-1][1]), token
        elif end > start:
            spans.append([min(reached, start), end, token, token])
        else:
            spans.append([reached, reached, token, token])
        reached = max(reached, end)
    if spans:
        spans[-1][1] = max(spans[-1][1], reached)
    return [
        Cell(visible(text[start:end]) if end > start else "◇", start, end, first, last)
        for start, end, first, last in spans
    ]


def visible(text: str) -> str:
    r"""The text with every character that has no shape, or that would move others, as a symbol.

    Controls get their names (⟨NUL⟩), a new line its arrow and the line break itself, marks of
    direction and other formats their code (⟨U+202E⟩), combining marks a circle to sit on.

    >>> visible("a\x07\u202eb")
    'a⟨BEL⟩⟨U+202E⟩b'
    """
    return "".join(map(_visible_character, text))


def _visible_character(character: str) -> str:
    code = ord(character)
    if character == "\n":
        return "↵\n"
    if character == "\t":
        return "⇥\t"
    if code in _NAMES:
        return f"⟨{_NAMES[code]}⟩"
    category = unicodedata.category(character)
    selects_shape = 0xFE00 <= code <= 0xFE0F or 0xE0100 <= code <= 0xE01EF
    if selects_shape or category in _SHAPELESS or (category == "Zs" and character != " "):
        return f"⟨U+{code:04X}⟩"
    if category in _COMBINING:
        return "◌" + character
    return character


# Their pictures (U+2400 and on) are missing from many fonts; names are not.
_CONTROLS = (
    "NUL SOH STX ETX EOT ENQ ACK BEL BS HT LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN "
    "EM SUB ESC FS GS RS US"
)
_NAMES = dict(enumerate(_CONTROLS.split())) | {0x7F: "DEL", 0xA0: "NBSP"}
# Control, format, surrogate, private use, unassigned; line and paragraph separators.
_SHAPELESS = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_COMBINING = frozenset({"Mn", "Me"})
