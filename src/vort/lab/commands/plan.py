"""`vort plan`: what a training step will take on so many GPUs."""

from typing import Annotated

import typer
from rich.console import Console

from vort.lab.commands import read_settings, say

console = Console()


def plan(
    size: Annotated[
        str, typer.Option(help="125m, 350m, 760m, 1.3b, 2.7b, 7b or 13b parameters.")
    ] = "1.3b",
    length: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 8192,
    gpus: Annotated[int, typer.Option(min=1, help="Devices, all alike.")] = 8,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Sequences of a step on each group that shares them.")
    ] = 1,
    context: Annotated[
        int | None, typer.Option(min=1, help="Ranks a sequence is cut over; the fewest that fit.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(help="GB of a device; the measured one's if absent.")
    ] = None,
    bandwidth: Annotated[
        float, typer.Option(help="GB/s that a device sends and receives: assumed, not measured.")
    ] = 50.0,
    model_set: Annotated[
        list[str] | None, typer.Option(help="One of VortConfig, e.g. num_scales=12.")
    ] = None,
) -> None:
    """Say what a training step takes on each GPU: memory by part, traffic by collective, time.

    Weights, gradients and moments are dealt out to all GPUs (FSDP2), sequences to --context ranks.
    Constants come from runs measured on one GPU; see docs/distributed.md for how well they do.
    """
    from vort.lab.training.costs import PLAN_SIZES, Costs, Shape, arrange, estimate
    from vort.models import VortConfig
    from vort.names import check_choice, typed

    check_choice("--size", size, PLAN_SIZES)
    if context is not None and gpus % context:
        raise typer.BadParameter(f"--context must divide --gpus {gpus}, got {context}")
    for name, value in (("--memory", memory), ("--bandwidth", bandwidth)):
        if value is not None and not 0 < value < float("inf"):
            raise typer.BadParameter(f"{name} must be positive and finite, got {value}")
    changes = typed(VortConfig, read_settings(model_set, "--model-set"), "--model-set")
    shape, costs = Shape.of(**{**PLAN_SIZES[size], **changes}), Costs.load()
    if context is not None and context > 1 and not shape.cuts:
        raise typer.BadParameter(
            "--context must be 1 where a layer has full attention, which hands on no state of "
            f"fixed size, got {context}"
        )
    room = costs.memory if memory is None else memory * 1e9
    options = {"memory": room, "bandwidth": bandwidth * 1e9, "sequences": batch_size}
    way = arrange(shape, gpus, length, costs, context=context, **options)  # type: ignore[arg-type]
    if way is None:
        raise ValueError(
            f"no arrangement of {gpus} GPUs with {room / 1e9:.0f} GB each has room for a step of "
            f"{batch_size} x {length:,} tokens of {shape.parameters / 1e9:.2f} billion parameters"
        )
    found = estimate(shape, way, costs)
    read = batch_size * length * way.data
    _say(f"model:     {shape.parameters:,} parameters, {shape.layers} layers of {shape.width}")
    _say(
        f"devices:   {gpus}: {way.data} groups (data) of {way.context} ranks (context), weights "
        "dealt out to all"
    )
    again = ", blocks computed again" if way.checkpointing else ""
    _say(f"step:      {read:,} tokens, {way.tokens:,.0f} on each device{again}")
    _table("memory of a device", "GB", found.memory, room=room)
    _table("received by a device in a step", "GB", found.traffic)
    _table("time of a step", "s", found.seconds, scale=1.0, total=found.step)
    _say(
        f"{read / found.step:,.0f} tokens/s in all, {read / found.step / gpus:,.0f} on each device"
    )
    source = costs.made_by
    _say(
        f"constants: {source['file']} on one {source['device']} at {source['commit']}; a network "
        f"of {bandwidth:g} GB/s is assumed, not measured"
    )


def _table(
    title: str,
    unit: str,
    parts: dict[str, float],
    *,
    scale: float = 1e9,
    total: float | None = None,
    room: float | None = None,
) -> None:
    from vort.lab.report.tables import Sheet

    whole = sum(parts.values()) if total is None else total
    rows = [[name, f"{value / scale:,.3f}"] for name, value in parts.items()]
    free = "" if room is None else f" of {room / scale:,.0f}"
    rows.append(["together" if total is None else "a step", f"{whole / scale:,.3f}{free}"])
    console.print(Sheet(title, ("part", unit), rows).to_rich())


def _say(text: str) -> None:
    say(console, text)
