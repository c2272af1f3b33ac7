"""How far a run is, for whoever watches: a bar on a terminal, else a line every few seconds."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

__all__ = ["EVERY", "Standing", "in_words", "shown"]

EVERY = 3.0  # seconds between lines, and between looks at a loss that is still on the device


@dataclass(frozen=True)
class Standing:
    """Where a run is: steps done and of how many, its mean loss and speed, as far as known."""

    done: int
    total: int
    loss: float | None
    tokens_per_second: float
    tokens: int  # of a step

    @property
    def seconds_left(self) -> float | None:
        """For the steps to come."""
        if not self.tokens_per_second:
            return None
        return (self.total - self.done) * self.tokens / self.tokens_per_second

    def __str__(self) -> str:
        left = self.seconds_left
        parts = (
            f"training {self.done:,}/{self.total:,}",
            "" if self.loss is None else f"loss {self.loss:.4f}",
            f"{self.tokens_per_second:,.0f} tokens/s" if self.tokens_per_second else "",
            "" if left is None else f"{in_words(left)} left",
        )
        return "  ".join(filter(None, parts))


def in_words(seconds: float) -> str:
    """A duration as people say it.

    >>> [in_words(x) for x in (0.4, 75, 7260)]
    ['under a second', '1 min 15 s', '2 h 1 min']
    """
    whole = round(seconds)
    if whole < 1:
        return "under a second"
    minutes, rest = divmod(whole, 60)
    if minutes < 1:
        return f"{rest} s"
    hours, minutes_rest = divmod(minutes, 60)
    return f"{minutes} min {rest} s" if hours < 1 else f"{hours:,} h {minutes_rest} min"


class _Lines:
    """Lines of plain text: what a file or a pipe can hold."""

    def __init__(self, console: Any) -> None:
        self.console, self.last = console, -EVERY

    def show(self, now: Standing) -> None:
        time = perf_counter()
        if now.loss is not None and (time - self.last >= EVERY or now.done == now.total):
            self.last = time
            self.say(str(now))

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
        self.console.file.flush()


class _Bar:
    """A bar that moves, and lines above it."""

    def __init__(self, display: Any, row: Any) -> None:
        self.display, self.row = display, row

    def show(self, now: Standing) -> None:
        self.display.update(self.row, completed=now.done, standing=str(now))

    def say(self, text: str) -> None:
        self.display.console.print(text, markup=False, highlight=False)


class _Nothing:
    def show(self, now: Standing) -> None: ...

    def say(self, text: str) -> None: ...


@contextmanager
def shown(wanted: bool, total: int) -> Iterator[Any]:
    """Something with `show(standing)` and `say(text)`."""
    if not wanted:
        yield _Nothing()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console()
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (BarColumn(bar_width=20), TextColumn("{task.fields[standing]}"))
    with Progress(*columns, console=console) as display:
        yield _Bar(display, display.add_task("training", total=total, standing=""))
