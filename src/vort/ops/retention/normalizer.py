"""Dividing the retrieved sum by its normaliser, safely."""

from typing import Literal, get_args

from torch import Tensor

__all__ = ["DEFAULT_EPS", "NORMALIZERS", "Normalizer", "normalize"]

Normalizer = Literal["decayed", "undecayed", "none"]
NORMALIZERS: tuple[str, ...] = get_args(Normalizer)

# Products of FAVOR+ features fall to 1e-14 at ordinary lengths, and power-law weights take them
# further down: a customary 1e-6 would erase the answer. float32 holds 1e-20 with room to spare.
DEFAULT_EPS = 1e-20


def normalize(numerator: Tensor, denominator: Tensor | None, eps: float) -> Tensor:
    """The retrieved value `numerator / (|denominator| + eps)`; the numerator itself without one.

    numerator [..., V], denominator [...]. On positive features this is eq. keyed-retrieval with
    eps_0 = eps. Features that are not positive can bring the denominator through zero: adding eps
    to it would then divide by nearly nothing, and its sign would turn the output over. The
    absolute value can do neither.

    >>> import torch
    >>> normalize(torch.ones(1), torch.tensor(-1.0), 1.0)
    tensor([0.5000])
    """
    if denominator is None:
        return numerator
    return numerator / (denominator.abs() + eps).unsqueeze(-1)
