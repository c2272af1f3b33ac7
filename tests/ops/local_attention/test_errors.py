"""Errors name the argument, what was given and what is allowed."""

import re
from typing import Any

import pytest
import torch

from vort.ops.local_attention import (
    apply_rope,
    attend_locally,
    local_attention,
    local_attention_exact,
)

GOOD = {"q": (1, 6, 4, 8), "k": (1, 6, 2, 8), "v": (1, 6, 2, 5)}


def inputs(**shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.zeros(shapes.get(name, shape)) for name, shape in GOOD.items()]


@pytest.mark.parametrize("function", [local_attention, local_attention_exact])
@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"q": (6, 4, 8)}, "q must be [B, T, H, D], got shape (6, 4, 8)"),
        ({"k": (1, 5, 2, 8)}, "k must have the batch and length of q, (1, 6), got shape"),
        ({"v": (2, 6, 2, 5)}, "v must have the batch and length of q, (1, 6), got shape"),
        ({"k": (1, 6, 2, 7)}, "k must have the head dimension of q, 8, got 7"),
        ({"v": (1, 6, 4, 5)}, "v must have the heads of k, 2, got 4"),
        ({"q": (1, 6, 3, 8)}, "heads of q must be a multiple of those of k, got 3 and 2"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    function: Any, shapes: dict[str, tuple[int, ...]], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        function(*inputs(**shapes), 3)


@pytest.mark.parametrize("function", [local_attention, local_attention_exact])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window": 0}, ValueError, "window must be at least 1 (the position itself), got 0"),
        ({"window": 4.0}, TypeError, "window must be a whole number, got 4.0"),
        ({"cu_seqlens": (0, 6)}, TypeError, "must be a tensor [N + 1] of integers, got tuple"),
        ({"cu_seqlens": [0, 3]}, ValueError, "must start at 0 and end at T=6, got 0 and 3"),
        ({"cu_seqlens": [1, 6]}, ValueError, "must start at 0 and end at T=6, got 1 and 6"),
        ({"cu_seqlens": [0, 4, 2, 6]}, ValueError, "must not decrease, got 4, 2 at index 1"),
        ({"cu_seqlens": [6]}, ValueError, "cu_seqlens must be [N + 1], got shape (1,)"),
        ({"cu_seqlens": [0.0, 6.0]}, TypeError, "cu_seqlens must hold integers"),
        ({"padding_mask": [[1] * 6]}, TypeError, "padding_mask must be bool"),
        ({"padding_mask": [[True] * 5]}, ValueError, "padding_mask must have shape (1, 6), got"),
        ({"rope_base": 0.0}, ValueError, "rope_base must be positive, got 0.0"),
    ],
)
def test_bad_options_are_refused(
    function: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    made = {"window": 3} | {
        name: torch.tensor(x) if isinstance(x, list) else x for name, x in options.items()
    }
    with pytest.raises(error, match=re.escape(message)):
        function(*inputs(), **made)


def test_packed_sequences_need_a_batch_of_one() -> None:
    shapes = {name: (2, *shape[1:]) for name, shape in GOOD.items()}
    with pytest.raises(ValueError, match="packed sequences with batch size 1, got 2"):
        local_attention(*inputs(**shapes), 3, cu_seqlens=torch.tensor([0, 6]))


def test_unknown_backend_integers_and_odd_rope_are_refused() -> None:
    with pytest.raises(ValueError, match="one of auto, block, exact, triton, got 'flex'"):
        local_attention(*inputs(), 3, backend="flex")  # type: ignore[arg-type]
    q, k, v = inputs()
    with pytest.raises(TypeError, match=r"k must be floating point, got torch\.int64"):
        local_attention(q, k.long(), v, 3)
    with pytest.raises(ValueError, match="head dimension must be even, got 5"):
        apply_rope(torch.zeros(1, 2, 3, 5), torch.arange(2))


@pytest.mark.parametrize("name", GOOD)
def test_nan_is_found_under_the_debug_flag_but_at_padding(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = dict(zip(GOOD, inputs(), strict=True))
    given[name][0, 3] = float("nan")
    real = torch.arange(6)[None] < 3
    calls: list[Any] = [
        lambda **masks: local_attention(**given, window=3, padding_mask=masks.get("real")),
        lambda **masks: attend_locally(**given, window=3, output_state=True, **masks),
    ]
    for call in calls:
        monkeypatch.delenv("VORT_DEBUG", raising=False)
        call()
        monkeypatch.setenv("VORT_DEBUG", "1")
        call(real=real)
        with pytest.raises(ValueError, match=rf"{name} must be finite, got nan at index \[0, 3"):
            call()
