"""What a causal model writes after a prompt, which it reads in pieces."""

import inspect
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from vort.lab.tasks.task import Integers

__all__ = ["PIECE", "write"]

# Tokens of a prompt that are read at a time.
PIECE = 8192


@torch.no_grad()
def write(
    model: Any,
    prompt: Integers,
    most: int,
    *,
    stop: Collection[int] = (),
    piece: int = PIECE,
) -> list[int]:
    """The likeliest tokens after a prompt, one after the other: `most` of them, or up to a stop.

    A Hugging Face model that takes `past_key_values` reads `piece` tokens at a time, so that no
    more than a piece is ever in memory but what it keeps of the past. One that does not, or gives
    none back, reads the prompt at once.
    """
    if piece < 1:
        raise ValueError(f"piece must be at least 1, got {piece}")
    _check_known(model, prompt)
    names = inspect.signature(model.forward).parameters
    tokens = torch.from_numpy(prompt)[None].to(next(model.parameters()).device)
    if "past_key_values" not in names:
        return _at_once(model, tokens, most, stop)
    options: dict[str, Any] = {"use_cache": True}
    if "logits_to_keep" in names:
        options["logits_to_keep"] = 1
    cache, found = None, None
    for begin in range(0, tokens.shape[1], piece):
        found = _read(model, tokens[:, begin : begin + piece], cache, options)
        cache = found.past_key_values
        if cache is None:
            return _at_once(model, tokens, most, stop)
    written: list[int] = []
    while found is not None:
        token = int(found.logits[0, -1].argmax())
        if token in stop:
            break
        written.append(token)
        if len(written) == most:
            break
        found = _read(model, tokens.new_tensor([[token]]), found.past_key_values, options)
    return written


def _check_known(model: Any, prompt: Integers) -> None:
    """Raise where a model has no embedding for a token."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    size = getattr(embedding, "num_embeddings", None)
    if size is not None and len(prompt) and int(prompt.max()) >= size:
        raise ValueError(
            f"the model has {size:,} tokens and the prompt token {int(prompt.max()):,}: is this "
            "its tokenizer?"
        )


def _read(model: Any, tokens: Tensor, cache: Any, options: dict[str, Any]) -> Any:
    try:
        return model(input_ids=tokens, past_key_values=cache, **options)
    except (IndexError, RuntimeError) as problem:  # of a table of positions
        most = getattr(model.config, "max_position_embeddings", None)
        seen = tokens.shape[1] + (0 if cache is None else cache.get_seq_length())
        full = isinstance(problem, torch.OutOfMemoryError)
        if isinstance(problem, RuntimeError) and (full or most is None or seen <= most):
            raise
        known = "" if most is None else f", {most:,} by its config"
        raise ValueError(f"the model has no position for so many tokens{known}") from problem


def _at_once(model: Any, tokens: Tensor, most: int, stop: Collection[int]) -> list[int]:
    from transformers import GenerationConfig

    plain: Any = GenerationConfig()  # type: ignore[no-untyped-call]
    # A model's own settings of `generate` (beams, penalties, an end) are not what is asked for.
    own, model.generation_config = model.generation_config, plain
    try:
        whole = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),  # or tokens like the padding's would be masked
            max_new_tokens=most,
            do_sample=False,
            eos_token_id=sorted(stop) or None,
            pad_token_id=0,
        )
    finally:
        model.generation_config = own
    written: list[int] = whole[0, tokens.shape[1] :].tolist()
    return written[: next((i for i, t in enumerate(written) if t in stop), len(written))]
