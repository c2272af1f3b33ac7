"""How a command ends when something is wrong: a line on standard error, and no traceback."""

import os
import re
from typing import Any

import typer
from typer.core import TyperCommand

from vort.lab.launcher import rank

__all__ = ["Command"]

# With this in the environment, what a command could not do is shown as Python shows it.
TRACEBACK = "VORT_TRACEBACK"


class Command(TyperCommand):
    """A command whose refusals are one line each, in the words of its options."""

    def invoke(self, ctx: Any) -> Any:
        """Run it; what a user can cause ends with 2, an interrupt with 130."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)
            raise typer.Exit(130) from None
        except Exception as problem:
            if os.environ.get(TRACEBACK) or not _is_users(problem):
                raise
            if rank() != 0 and not _is_own(problem):
                raise typer.Exit(2) from problem  # the first process says it for all
            options = {p.name: max(p.opts, key=len) for p in self.params if p.name}
            who = f"rank {rank()}: " if rank() != 0 and _is_memory(problem) else ""
            typer.echo(f"vort {_name(ctx)}: {who}{_in_a_line(problem, options)}", err=True)
            raise typer.Exit(2) from problem


def _name(ctx: Any) -> str:
    """What was typed after `vort`."""
    above = "" if ctx.parent is None or ctx.parent.parent is None else _name(ctx.parent) + " "
    return f"{above}{ctx.info_name}"


def _is_users(problem: Exception) -> bool:
    """Whether a user can cause it: files, settings, packages, memory. Others are ours."""
    from safetensors import SafetensorError
    from torch import OutOfMemoryError

    kinds = (OSError, ValueError, TypeError, ImportError, ArithmeticError, MemoryError)
    others = (SafetensorError, OutOfMemoryError, typer.BadParameter)
    # Hugging Face wraps what is wrong with a setting in an error of its own.
    known = isinstance(problem, (*kinds, *others)) or _is_memory(problem)
    return known or type(problem).__name__.startswith("Strict")


def _is_own(problem: Exception) -> bool:
    """Whether one of several processes may have it while the others have not."""
    return isinstance(problem, ConnectionError) or _is_memory(problem)


def _is_memory(problem: Exception) -> bool:
    from torch import OutOfMemoryError

    # On a CPU torch raises what it raises for all else.
    allocator = isinstance(problem, RuntimeError) and "DefaultCPUAllocator" in str(problem)
    return isinstance(problem, MemoryError | OutOfMemoryError) or allocator


def _in_a_line(problem: Exception, options: dict[str, str]) -> str:
    if isinstance(problem, typer.BadParameter):
        text = problem.message
        hint = problem.param_hint
        text = f"{hint}: {text}" if isinstance(hint, str) else text
    elif isinstance(problem, OSError) and problem.strerror:
        text = f"{problem.strerror}: {problem.filename or 'standard output'}"
    elif type(problem).__name__.startswith("Strict"):
        text = str(problem.__cause__ or problem)
    elif asked := re.search(r"DefaultCPUAllocator.* (\d+) bytes", str(problem)):
        text = f"there is no memory for {int(asked[1]) / 1e9:,.1f} GB at once"
    else:
        text = str(problem) or type(problem).__name__
    text = " ".join(text.split())
    # "steps must be ..." and "log='wandb' needs ..." are about --steps and --log.
    first = re.match(r"(\w+)(='(\w+)')? (?=must|needs|takes)", text)
    if first and options.get(first[1], "").startswith("--"):
        given = f" {first[3]}" if first[3] else ""
        text = f"{options[first[1]]}{given} {text[first.end() :]}"
    return text
