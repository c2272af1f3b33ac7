"""Bad input: the error names the argument, what was given and what is allowed."""

from typing import Any

import pytest
import torch

from vort.ops.retention import (
    NORMALIZERS,
    RetentionState,
    empty_state,
    exact_retention_with_kernel,
    retention,
    retention_minimal,
    retention_step,
)
from vort.ops.retention.final import final_state


def arguments(**changes: Any) -> dict[str, Any]:
    token = (1, 6, 2)
    return {
        "q": torch.ones(*token, 4),
        "k": torch.ones(*token, 4),
        "v": torch.ones(*token, 3),
        "write": torch.ones(*token, 5),
        "log_decay": -torch.ones(5),
        **changes,
    }


BAD = {
    "q of three dimensions": (
        {"q": torch.ones(6, 2, 4)},
        r"q must be \[B, T, H, K\], got \[6, 2, 4\]",
    ),
    "k unlike q": (
        {"k": torch.ones(1, 6, 2, 3)},
        r"k must have the shape of q \[1, 6, 2, 4\], got",
    ),
    "v of other length": (
        {"v": torch.ones(1, 5, 2, 3)},
        r"v must be \[1, 6, 2, V\], got \[1, 5, 2, 3\]",
    ),
    "write of other heads": (
        {"write": torch.ones(1, 6, 1, 5)},
        r"write must be \[1, 6, 2, S\], got",
    ),
    "no head": (
        {"q": torch.ones(1, 6, 0, 4), "k": torch.ones(1, 6, 0, 4)}
        | {"v": torch.ones(1, 6, 0, 3), "write": torch.ones(1, 6, 0, 5)},
        r"q must have H >= 1, got \[1, 6, 0, 4\]",
    ),
    "no key": (
        {"q": torch.ones(1, 6, 2, 0), "k": torch.ones(1, 6, 2, 0)},
        r"q must have K >= 1, got \[1, 6, 2, 0\]",
    ),
    "no value": ({"v": torch.ones(1, 6, 2, 0)}, r"v must have V >= 1, got \[1, 6, 2, 0\]"),
    "no scale": ({"write": torch.ones(1, 6, 2, 0)}, "write must have at least one scale"),
    "read of other scales": (
        {"read": torch.ones(1, 6, 2, 4)},
        r"read must have write's shape \[1, 6, 2, 5\]",
    ),
    "log_decay of other scales": (
        {"log_decay": -torch.ones(4)},
        r"log_decay must be \[5\] or \[2, 5\]",
    ),
    "growth": (
        {"log_decay": torch.tensor([0.0, -1, -1, 0.5, -1])},
        r"log_decay must be <= 0, got 0.5 at index \[3\]",
    ),
    "an infinite decay": (
        {"log_decay": torch.tensor([0.0, -1, -float("inf"), -1, -1])},
        r"log_decay must be finite, got -inf at index \[2\]",
    ),
    "integers": (
        {"v": torch.ones(1, 6, 2, 3, dtype=torch.long)},
        "v must be floating point, got torch.int64",
    ),
    "unknown normalizer": (
        {"normalizer": "half"},
        "normalizer must be one of decayed, undecayed, none, got 'half'",
    ),
    "unknown backend": (
        {"backend": "cuda"},
        "backend must be one of auto, exact, recurrent, chunk, triton, got",
    ),
    "odd chunk_size": (
        {"chunk_size": 20, "backend": "chunk"},
        "chunk_size must be a positive multiple of 16, got 20",
    ),
    "a chunk_size without chunks": (
        {"chunk_size": 64, "backend": "exact"},
        "chunk_size must be None for backend 'exact', got 64",
    ),
    "a chunk_size for steps": (
        {"chunk_size": 64, "backend": "recurrent"},
        "chunk_size must be None for backend 'recurrent', got 64",
    ),
    "an odd chunk_size for auto": (
        {"chunk_size": 20},
        "chunk_size must be a positive multiple of 16, got 20",
    ),
    "bounds that start late": (
        {"cu_seqlens": torch.tensor([1, 6])},
        "cu_seqlens must start at 0, got 1",
    ),
    "bounds that end early": (
        {"cu_seqlens": torch.tensor([0, 5])},
        "cu_seqlens must end at T = 6, got 5",
    ),
    "bounds that fall": (
        {"cu_seqlens": torch.tensor([0, 4, 2, 6])},
        "cu_seqlens must not decrease, got 4 then 2 at index 2",
    ),
    "no bounds": (
        {"cu_seqlens": torch.tensor([0])},
        r"cu_seqlens must be \[N \+ 1\] with N >= 1, got \[1\]",
    ),
    "real bounds": (
        {"cu_seqlens": torch.tensor([0.0, 6.0])},
        "cu_seqlens must be int32 or int64, got torch.float32",
    ),
    "places of other shape": (
        {"asked": torch.tensor([[1]])},
        r"asked must be \[N\] places, int64, got \[1, 1\] of torch.int64",
    ),
    "real places": (
        {"asked": torch.tensor([1.0])},
        r"asked must be \[N\] places, int64, got \[1\] of torch.float32",
    ),
    "places beyond the last": (
        {"asked": torch.tensor([2, 6])},
        r"asked must lie in \[0, 6\), got 2 to 6",
    ),
    "G of other size": (
        {"initial_state": RetentionState(torch.ones(1, 2, 5, 4, 4), torch.ones(1, 2, 5, 4))},
        r"initial_state.G must be \[1, 2, 5, 4, 3\] \(N, H, S, K, V\), got \[1, 2, 5, 4, 4\]",
    ),
    "b without G": (
        {"initial_state": RetentionState(None, torch.ones(1, 2, 5, 4))},  # type: ignore[arg-type]
        "initial_state.G must be a tensor beside b, got None",
    ),
    "b missing": (
        {"initial_state": RetentionState(torch.ones(1, 2, 5, 4, 3), None)},
        r"initial_state.b must be \[1, 2, 5, 4\] with normalizer 'decayed', got None",
    ),
    "b of the other normalizer": (
        {
            "initial_state": RetentionState(torch.ones(1, 2, 5, 4, 3), torch.ones(1, 2, 5, 4)),
            "normalizer": "undecayed",
        },
        r"initial_state.b must be \[1, 2, 1, 4\] with normalizer 'undecayed', got \[1, 2, 5, 4\]",
    ),
    "b without a normalizer": (
        {
            "initial_state": RetentionState(torch.ones(1, 2, 5, 4, 3), torch.ones(1, 2, 5, 4)),
            "normalizer": "none",
        },
        "initial_state.b must be None with normalizer 'none', got a tensor",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str) -> None:
    changes, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        retention(**arguments(**changes))


def test_packing_takes_one_row() -> None:
    two = {name: x.expand(2, -1, -1, -1) for name, x in arguments().items() if x.dim() == 4}
    with pytest.raises(ValueError, match="q must have B = 1, got 2"):
        retention(**arguments(**two, cu_seqlens=torch.tensor([0, 6])))


@pytest.mark.parametrize("name", ["q", "k", "v", "write", "read"])
def test_nan_is_found_under_the_debug_flag(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(1, 6, 2, 5 if name in ("write", "read") else 3 if name == "v" else 4)
    x[0, 3, 1, 2] = float("nan")
    retention(**arguments(**{name: x}))
    monkeypatch.setenv("VORT_DEBUG", "1")
    with pytest.raises(
        ValueError, match=rf"{name} must be finite, got nan at index \[0, 3, 1, 2\]"
    ):
        retention(**arguments(**{name: x}))


@pytest.mark.parametrize("name", ["state.G", "state.b", "q_t", "k_t", "v_t", "write_t", "read_t"])
def test_a_step_finds_nan_under_the_debug_flag(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"q_t": 4, "k_t": 4, "v_t": 3, "write_t": 5, "read_t": 5}
    token = {key: torch.ones(1, 2, size) for key, size in sizes.items()}
    G, b = empty_state(1, 2, 5, 4, 3)
    {**token, "state.G": G, "state.b": b}[name].view(-1)[3] = float("nan")  # type: ignore[union-attr]
    retention_step(RetentionState(G, b), log_decay=-torch.ones(5), **token)
    monkeypatch.setenv("VORT_DEBUG", "1")
    with pytest.raises(ValueError, match=rf"{name} must be finite, got nan at index \[0"):
        retention_step(RetentionState(G, b), log_decay=-torch.ones(5), **token)


def test_nan_decay_is_always_found() -> None:
    with pytest.raises(ValueError, match="log_decay must be <= 0, got nan"):
        retention(**arguments(log_decay=torch.full((5,), float("nan"))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens": [0, 6]}, r"cu_seqlens must be a tensor \[N \+ 1\] of integers, got list"),
        ({"chunk_size": 32.0}, r"chunk_size must be a whole number, got 32\.0"),
        (
            {"initial_state": torch.ones(1, 2, 5, 4, 3)},
            "initial_state must be a RetentionState of G and b, got Tensor",
        ),
    ],
)
def test_other_types_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        retention(**arguments(**changes))


STEP = {
    "a misspelt normalizer": ({"normalizer": "decay"}, "normalizer must be one of decayed, und"),
    "one key for two heads": (
        {"k_t": torch.ones(1, 1, 4)},
        r"k_t must be \[1, 2, 4\] to go with the state, got \[1, 1, 4\]",
    ),
    "a value of other size": ({"v_t": torch.ones(1, 2, 1)}, r"v_t must be \[1, 2, 3\]"),
    "writes of other scales": ({"write_t": torch.ones(1, 2, 1)}, r"write_t must be \[1, 2, 5\]"),
    "reads of other scales": ({"read_t": torch.ones(1, 2, 1)}, r"read_t must be \[1, 2, 5\]"),
    "decays of other scales": (
        {"log_decay": -torch.ones(2, 1)},
        r"log_decay must be \[5\] or \[2, 5\] to go with the state, got \[2, 1\]",
    ),
}


def step(normalizer: str = "decayed", **changes: Any) -> None:
    token = {
        "q_t": torch.ones(1, 2, 4),
        "k_t": torch.ones(1, 2, 4),
        "v_t": torch.ones(1, 2, 3),
        "write_t": torch.ones(1, 2, 5),
        "log_decay": -torch.ones(5),
    }
    state = changes.pop("state", empty_state(1, 2, 5, 4, 3))
    retention_step(state, **{**token, "normalizer": normalizer, **changes})


@pytest.mark.parametrize("name", STEP)
def test_a_token_that_does_not_go_with_the_state_is_named(name: str) -> None:
    changes, message = STEP[name]
    with pytest.raises(ValueError, match=message):
        step(**changes)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("made_for", NORMALIZERS)
def test_a_step_takes_the_state_of_its_own_normalizer_alone(normalizer: str, made_for: str) -> None:
    state = empty_state(1, 2, 5, 4, 3, normalizer=made_for)
    if normalizer == made_for:
        step(normalizer, state=state)
        return
    with pytest.raises(ValueError, match=rf"state\.b must be .* with normalizer '{normalizer}'"):
        step(normalizer, state=state)


def test_a_misspelt_normalizer_is_refused_by_every_form() -> None:
    x, rate = torch.ones(1, 3, 1, 1), torch.zeros(1)
    calls: list[Any] = [
        lambda: retention_minimal(x, x, x, x, rate, normalizer="Decayed"),
        lambda: final_state(x, x, x, rate, normalizer="Decayed"),
        lambda: empty_state(1, 1, 1, 1, 1, normalizer="Decayed"),
        lambda: exact_retention_with_kernel(
            x, x, x, x[..., 0], lambda order, lag: order**-lag, normalizer="Decayed"
        ),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"normalizer must be .* got 'Decayed'"):
            call()
