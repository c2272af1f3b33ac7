"""What a run shows while it runs."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

__all__ = ["Bar", "progress_bar"]


class Bar:
    """A bar with steps, tokens/s, time left and loss; silent without a display."""

    def __init__(self, display: Any = None, total: int = 0, done: int = 0) -> None:
        self.display = display
        if display is not None:
            fields = {"speed": "", "loss": ""}
            self.row = display.add_task("training", total=total, completed=done, **fields)

    def update(self, done: int, tokens_per_second: float, loss: float | None) -> None:
        """Show where the run stands."""
        if self.display is None:
            return
        shown = "" if loss is None else f"loss {loss:.4f}"
        speed = f"{tokens_per_second:,.0f} tokens/s" if tokens_per_second else ""
        self.display.update(self.row, completed=done, speed=speed, loss=shown)


def progress_bar(wanted: bool) -> AbstractContextManager[Any]:
    """A display for `Bar`; None, in a context, where none is wanted."""
    if not wanted:
        return nullcontext()
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    speed, loss = TextColumn("{task.fields[speed]}"), TextColumn("{task.fields[loss]}")
    name = TextColumn("{task.description}")
    return Progress(name, BarColumn(), MofNCompleteColumn(), speed, TimeLeft(), loss)
