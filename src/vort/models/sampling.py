"""From logits to a token."""

import torch
from torch import Tensor

__all__ = ["check_sampling", "sample_token"]


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise if a setting is out of range."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 (greedy) or positive, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], got {top_p}")


def sample_token(
    logits: Tensor,
    generator: torch.Generator,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> int:
    """One token drawn from `logits` `[vocab_size]`; the likeliest if temperature is 0.

    Args:
        logits: unnormalised log-probabilities.
        generator: where randomness comes from.
        temperature: below 1 sharpens, above 1 flattens.
        top_k: draw from the k likeliest tokens alone.
        top_p: draw from the fewest likeliest tokens that hold this much probability.

    >>> sample_token(torch.tensor([0.0, 2.0, 1.0]), torch.Generator(), temperature=0)
    1
    """
    if temperature == 0:
        return int(logits.argmax())
    logits = logits.float() / temperature
    if top_k is not None and top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    probabilities = logits.softmax(-1)
    if top_p is not None:
        probabilities = _nucleus(probabilities, top_p)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Zero all but the likeliest tokens up to and including the one that reaches `top_p`."""
    ordered, tokens = probabilities.sort(descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(probabilities).scatter(-1, tokens, ordered * (before < top_p))
