"""The `vort` command: its parts, put together."""

import sys
from collections.abc import Callable
from typing import Annotated

try:
    import typer

    from vort.lab.commands import probe
    from vort.lab.commands.command import Command
    from vort.lab.commands.eval import evaluate
    from vort.lab.commands.figures import figures, report
    from vort.lab.commands.generate import chat, generate
    from vort.lab.commands.kernel import kernel
    from vort.lab.commands.lens import lens
    from vort.lab.commands.plan import plan
    from vort.lab.commands.reproduce import reproduce
    from vort.lab.commands.train import train
    from vort.lab.commands.tune import tune
    from vort.lab.processes import keep_memory
except ModuleNotFoundError as missing:  # the core does not need them
    sys.exit(f"the vort command needs the extra `lab`: pip install 'vort[lab]' ({missing})")

app = typer.Typer(
    help="Sequence models with power-law memory.", no_args_is_help=True, add_completion=False
)
_COMMANDS: dict[str, Callable[..., None]] = {
    "train": train,
    "generate": generate,
    "chat": chat,
    "lens": lens,
    "eval": evaluate,
    "plan": plan,
    "reproduce": reproduce,
    "report": report,
    "figures": figures,
    "tune": tune,
    "kernel": kernel,
}
for name, command in _COMMANDS.items():
    app.command(name, cls=Command)(command)
app.add_typer(probe.app, name="probe")


def _version(wanted: bool) -> None:
    if wanted:
        import vort

        typer.echo(f"vort {vort.__version__}")
        raise typer.Exit


@app.callback()
def vort_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which it is.")
    ] = False,
) -> None:
    """Sequence models with power-law memory."""


def main() -> None:
    """Entry point of the console script."""
    keep_memory()
    app(prog_name="vort")  # also where it was started as a module


if __name__ == "__main__":
    main()
