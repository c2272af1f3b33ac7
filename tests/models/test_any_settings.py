"""Models of settings drawn at random: however rows are cut, padded or packed, states are the same.

Other tests ask one memory or one option at a time; here options meet.
"""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from tests.ops.any_settings.run_interpreter import drawn
from vort.models import VortConfig, VortModel

RELATIVE, ABSOLUTE = 2e-4, 3e-5
# Gradients that are nothing but rounding: a window of one position has none to its queries.
ROUNDING = 2e-4
WIDTH, VOCABULARY, ROWS = 32, 19, 2


def model_of(seed: int, source: random.Random) -> VortModel:
    settings, _, _ = drawn(seed)
    layers = source.choice((1, 2, 3))
    if layers > 1 and source.random() < 0.3:
        others = ["softmax", "gla", "vort", "none", "gated_delta"]
        settings["layer_memories"] = [settings["memory"], source.choice(others)]
    if layers > 1 and source.random() < 0.3:
        settings["layer_settings"] = [{}, {"sliding_window": source.choice((0, 2, 7))}]
    torch.manual_seed(seed)
    config = VortConfig(
        **settings, intermediate_size=24, num_hidden_layers=layers, vocab_size=VOCABULARY,
        match_parameters=False, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = VortModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


class Rows:
    """Tokens of a few rows, and their marks of entities where a model reads them."""

    def __init__(self, model: VortModel, length: int) -> None:
        self.given = {"input_ids": torch.randint(VOCABULARY, (ROWS, length))}
        if model.needs_entity:
            self.given["entity_mask"] = (torch.rand(ROWS, length) < 0.3).long()

    def cut(self, start: int, end: int) -> dict[str, Tensor]:
        return {name: x[:, start:end] for name, x in self.given.items()}

    def in_one_row(self) -> dict[str, Tensor]:
        return {name: x.reshape(1, -1) for name, x in self.given.items()}

    def padded(self, before: list[int], width: int) -> tuple[dict[str, Tensor], Tensor]:
        """Each row after so many tokens of no meaning, and which are its own."""
        length = self.given["input_ids"].shape[1]
        own = torch.zeros(ROWS, width, dtype=torch.long)
        found = {name: torch.randint(2, (ROWS, width)) for name in self.given}
        for row, start in enumerate(before):
            own[row, start : start + length] = 1
            for name, x in self.given.items():
                found[name][row, start : start + length] = x[row]
        return found, own


def agree(
    got: Tensor, wanted: Tensor, what: Any, relative: float = RELATIVE, absolute: float = ABSOLUTE
) -> None:
    error, size = (got - wanted).double().norm(), wanted.double().norm()
    assert error <= relative * size + absolute, (what, error, size)


def hidden(model: VortModel, **given: Any) -> Tensor:
    found: Tensor = model(**({"use_cache": False} | given)).last_hidden_state
    return found


def check(seed: int) -> None:
    source = random.Random(seed)
    model, length = model_of(seed, source), source.choice((5, 13, 40, 70))
    rows, what = Rows(model, length), drawn(seed)
    width = length + 3
    padded, own = rows.padded([source.randrange(4) for _ in range(ROWS)], width)
    with torch.no_grad():
        whole = hidden(model, **rows.given)
        places = torch.tensor(sorted(source.sample(range(ROWS * length), 5)))
        asked = hidden(model, **rows.given, asked=places)
        agree(asked, whole.flatten(0, 1)[places], ("asked", what))
        got = hidden(model, **padded, attention_mask=own)
        agree(got[own.bool()], whole.flatten(0, 1), ("padded", what))
        bounds = torch.arange(ROWS + 1) * length
        for how in ({"cu_seqlens": bounds}, {"position_ids": torch.arange(length).repeat(1, ROWS)}):
            got = hidden(model, **rows.in_one_row(), **how)
            agree(got.view_as(whole), whole, (list(how), what))
        for step in (1, 5) if model.keeps_state else ():
            cache, parts, start = model.new_cache(), [], source.randrange(1, length)
            for first in (0, *range(start, min(length, start + 10), step)):
                end = start if first == 0 else min(length, first + step)
                now = {"past_key_values": cache, "use_cache": True}
                parts.append(hidden(model, **rows.cut(first, end), **now))
            got = torch.cat(parts, 1)
            agree(got, whole[:, : got.shape[1]], (f"pieces of {step}", what))
    model.train()
    back, grads = torch.randn_like(whole).flatten(0, 1), []
    for given in (rows.given, padded | {"attention_mask": own}):
        y = hidden(model, **given)
        y = y[own.bool()] if "attention_mask" in given else y.flatten(0, 1)
        options = {"allow_unused": True, "materialize_grads": True}
        grads.append(torch.autograd.grad(y, list(model.parameters()), back, **options))
    for (name, _), wanted, got in zip(model.named_parameters(), *grads, strict=True):
        agree(got, wanted, (f"d{name}", what), 1e-3, ROUNDING)


@pytest.mark.parametrize("seed", range(8))
def test_rows_may_be_cut_padded_and_packed(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 300, 20))
def test_rows_of_many_more_may(first: int) -> None:
    for seed in range(first, first + 20):
        check(seed)
