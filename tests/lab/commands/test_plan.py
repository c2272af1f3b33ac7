"""`vort plan` says what a step takes, or in a line why it cannot."""

from typer.testing import CliRunner

from vort.cli import app

HYBRID = ("--model-set", 'layer_memories=["vort","softmax"]')


def said(*options: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["plan", *options])
    return found.exit_code, found.output


def test_a_plan_names_memory_traffic_and_time() -> None:
    code, text = said("--size", "1.3b", "--length", "1048576", "--gpus", "64")
    assert code == 0
    for part in ("1,295,063,040 parameters", "moments of AdamW", "all-gather of states"):
        assert part in text
    assert "tokens/s in all" in text
    assert "assumed, not measured" in text


def test_what_cannot_be_planned_is_said_in_a_line() -> None:
    for options, message in (
        (("--size", "1b"), "--size must be one of"),
        (("--gpus", "6", "--context", "4"), "--context must divide --gpus 6, got 4"),
        (("--bandwidth", "0"), "--bandwidth must be positive and finite"),
        (("--length", "100000000", "--gpus", "1"), "no arrangement of 1 GPUs with 141 GB each"),
        (("--model-set", "num_scale=3"), "num_scales"),
        (("--model-set", "memory=gla"), "softmax and none, got gla"),
        ((*HYBRID, "--context", "2"), "--context must be 1 where a layer has full attention"),
    ):
        code, text = said(*options)
        assert code == 2, options
        assert message in text, text
        assert len(text.strip().splitlines()) == 1
