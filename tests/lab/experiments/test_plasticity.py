import json

import pytest

from vort.lab.experiments.plasticity import claims, run


def test_a_record_is_ready_for_json_and_judged_claim_by_claim() -> None:
    record = run((0, 1), steps=1, length=32, iterations=2)
    again = json.loads(json.dumps(record, allow_nan=False))
    for group in ("with", "without", "refined"):
        assert [each["seed"] for each in again[group]["runs"]] == [0, 1]
        assert all(0.05 <= x <= 1 for x in again[group]["runs"][0]["orders"][0].values())
        assert [found["count"] for found in again[group]["difference"]] == [2, 2]
    assert all(d["holds"] for each in again["refined"]["runs"] for d in each["descents"])
    assert len(again["with"]["runs"][0]["losses"]) >= 1
    where = [claim.where for claim in claims(again)]
    assert where == [
        "figure diffusion-plasticity (b)",
        "section plasticity",
        "theorem plasticity",
    ]
    again["settings"]["seeds"] = [0]
    with pytest.raises(ValueError, match="at least 2 seeds to be judged, got 1"):
        claims(again)
