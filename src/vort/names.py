"""Names and values that people type, refused with a hint when they are not known or do not fit."""

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from numbers import Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

__all__ = ["check_choice", "refuse_unknown", "typed"]

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_MISFIT = object()


def refuse_unknown(
    owner: str,
    given: Iterable[str],
    known: Collection[str],
    error: type[Exception] = TypeError,
    kind: str = "setting",
) -> None:
    """Raise at the first name of `given` that `owner` does not know, with the nearest it does.

    >>> refuse_unknown("Books", ["lenght"], ["length", "seed"])
    Traceback (most recent call last):
    TypeError: Books has no setting 'lenght'; did you mean length?
    """
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
            raise error(f"{owner} has no {kind} {name!r}; {hint}")


def check_choice(name: str, value: object, allowed: Collection[str]) -> None:
    """Raise unless `value` is one of `allowed`.

    >>> check_choice("routing", "best", ("continuous", "banks"))
    Traceback (most recent call last):
    ValueError: routing must be one of continuous, banks, got 'best'
    """
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def typed(kind: type, given: Mapping[str, Any], option: str = "") -> dict[str, Any]:
    """The settings `given` with the types of the dataclass `kind`; raise at one that has no such.

    What a command line or JSON spells otherwise is taken as meant: 1e3 is a whole number, 3 a
    number, a list a tuple. Settings that `kind` does not have are left as they are. `option` stands
    before the name of a setting that is refused.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Box:
    ...     width: int | None = None
    >>> typed(Box, {"width": 1e3})
    {'width': 1000}
    >>> typed(Box, {"width": "wide"})
    Traceback (most recent call last):
    TypeError: width must be a whole number or null, got 'wide'
    """
    types = {field.name: field.type for field in fields(kind)}
    found = {}
    for name, value in given.items():
        found[name] = _as_type(types.get(name, Any), value)
        if found[name] is _MISFIT:
            spelled = f"{option} {name}".strip()
            wanted = _in_words(types[name])
            # a word that is none of the choices has a right type and a wrong value
            error = ValueError if wanted.startswith("one of") else TypeError
            raise error(f"{spelled} must be {wanted}, got {value!r}")
    return found


def _as_type(wanted: Any, value: Any) -> Any:
    """The value as one of a type, or `_MISFIT`; types that are no plain ones take everything."""
    origin, parts = get_origin(wanted), get_args(wanted)
    if origin in (Union, UnionType):
        fitting = (_as_type(part, value) for part in parts)
        return next((found for found in fitting if found is not _MISFIT), _MISFIT)
    if origin is Literal:
        return value if value in parts else _MISFIT
    if origin in (tuple, list):
        if not isinstance(value, (tuple, list)):
            return _MISFIT
        items = [_as_type(parts[0], item) for item in value]
        short = origin is tuple and parts[-1] is not ... and len(items) != len(parts)
        return _MISFIT if short or any(item is _MISFIT for item in items) else origin(items)
    if wanted is NoneType:
        return value if value is None else _MISFIT
    if wanted is bool:
        return value if isinstance(value, bool) else _MISFIT
    if wanted is str:
        return str(value) if isinstance(value, (str, int, float)) else _MISFIT
    if wanted not in (int, float):
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        return _MISFIT
    if wanted is int:
        number: Any = value  # of numpy as well
        return int(number) if float(number).is_integer() else _MISFIT
    return float(value)


def _in_words(wanted: Any) -> str:
    origin, parts = get_origin(wanted), get_args(wanted)
    if origin in (Union, UnionType):
        return " or ".join(_in_words(part) for part in parts)
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if origin in (tuple, list):
        return f"a list, each {_in_words(parts[0])}"
    return "null" if wanted is NoneType else _WORDS.get(wanted, str(wanted))
