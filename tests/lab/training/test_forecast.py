"""What a run is said to take before it starts."""

from dataclasses import replace
from typing import Any

import pytest

from tests.lab.training.tiny import TASK, quick, tiny
from vort.lab.training.forecast import forecast


@pytest.mark.parametrize("overhead", [0.0, 0.05])
def test_a_machine_as_slow_for_a_few_tokens_as_for_many_is_timed_with_many(
    overhead: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's launches take as long for a few tokens; a step that hides behind them is no hour."""
    asked: list[int] = []

    def takes(scorer: Any, batch: dict[str, Any], mixed: bool) -> float:
        asked.append(batch["input_ids"].numel())
        return overhead + 1e-6 * asked[-1]

    monkeypatch.setattr("vort.lab.training.forecast._pass", takes)
    found = forecast(tiny(), replace(TASK, length=2048), quick(batch_size=32))
    assert max(asked) == 32 * 2048
    assert found.seconds == pytest.approx(overhead + 1e-6 * 32 * 2048)
