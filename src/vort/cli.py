"""The `vort` command: its parts, put together."""

import sys

try:
    import typer

    from vort.lab.commands import probe
    from vort.lab.commands.figures import figures, report
    from vort.lab.commands.generate import generate
    from vort.lab.commands.kernel import kernel
    from vort.lab.commands.lens import lens
    from vort.lab.commands.reproduce import reproduce
    from vort.lab.commands.train import evaluate, train
    from vort.lab.commands.tune import tune
except ModuleNotFoundError as missing:  # the core does not need them
    sys.exit(f"the vort command needs the extra `lab`: pip install 'vort[lab]' ({missing})")

app = typer.Typer(
    help="Sequence models with power-law memory.", no_args_is_help=True, add_completion=False
)
app.command()(kernel)
app.command()(reproduce)
app.command()(train)
app.command("eval")(evaluate)
app.command()(tune)
app.command()(generate)
app.command()(lens)
app.command()(report)
app.command()(figures)
app.add_typer(probe.app, name="probe")


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
