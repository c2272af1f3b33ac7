"""Settings: complete, checked, and nothing dropped in silence."""

import json
from dataclasses import fields

import pytest

from vort.lab.training import TrainingConfig


def test_settings_survive_a_trip_through_json() -> None:
    config = TrainingConfig(steps=5, betas=(0.8, 0.9), log="tensorboard")
    assert TrainingConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_unknown_keys_are_an_error_that_helps() -> None:
    with pytest.raises(TypeError, match=r"no setting 'learning_rat'; did you mean learning_rate\?"):
        TrainingConfig.from_dict({"steps": 1, "learning_rat": 1e-3})


def test_every_setting_is_described() -> None:
    for field in fields(TrainingConfig):
        assert f"\n        {field.name}: " in (TrainingConfig.__doc__ or "")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give exactly one of steps and epochs"),
        ({"steps": 1, "epochs": 1}, "give exactly one of steps and epochs, got steps=1"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"steps": 1, "batch_size": 6, "accumulation": 4}, "accumulation must divide .*= 6, got 4"),
        ({"steps": 1, "learning_rate": 0.0}, "learning_rate must be positive and finite, got 0.0"),
        ({"steps": 1, "learning_rate": float("nan")}, "learning_rate must be positive"),
        ({"steps": 1, "warmup": 2}, r"warmup must lie in \[0, 1\], got 2"),
        ({"steps": 1, "weight_decay": -1}, "weight_decay must be at least 0, got -1"),
        ({"steps": 1, "weight_decay": float("nan")}, "weight_decay must be at least 0 and finite"),
        ({"steps": 1, "eps": float("inf")}, "eps must be at least 0 and finite, got inf"),
        ({"steps": 1, "betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\), got .*1.0"),
        ({"steps": 1, "betas": (0.9,)}, "betas must be two numbers"),
        ({"steps": 1, "precision": "fp8"}, "precision must be one of .*got 'fp8'"),
        ({"steps": 1, "log": "paper"}, "log must be one of .*got 'paper'"),
    ],
)
def test_impossible_settings_are_named(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**settings)
