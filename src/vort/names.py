"""Names that people type: settings and choices, refused with a hint when they are not known."""

import difflib
from collections.abc import Collection, Iterable

__all__ = ["check_choice", "refuse_unknown"]


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
