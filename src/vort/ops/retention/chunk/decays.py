"""What remains of a weight after so many steps, wherever a chunk needs it."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Decays"]


@dataclass(frozen=True)
class Decays:
    """exp(log_decay * lag) for lags 0..C; H is 1 for decays that all heads share.

    rates: log_decay [H, S]. power: [C + 1, H, S]; drop: the same minus 1, kept apart because
    1 - 1e-7 has no float32. seen [C, C], by source: 1 at [i, t] where t may see i.
    """

    rates: Tensor
    power: Tensor
    drop: Tensor
    seen: Tensor

    @staticmethod
    def of(rates: Tensor, chunk: int, include_self: bool) -> "Decays":
        """The tables for log_decay [H, S]."""
        lags = torch.arange(chunk + 1, device=rates.device)
        power = decay_at(rates, lags)
        drop = torch.expm1(rates * lags[:, None, None]).masked_fill_(power == 0, -1)
        position = lags[:chunk]
        seen = position - position[:, None] >= (0 if include_self else 1)
        return Decays(rates, power, drop, seen.to(rates.dtype))


def least_exponent(dtype: torch.dtype) -> float:
    """Weights that have decayed below exp of this become 0.

    On a CPU, subnormal numbers multiply a hundred times slower, and a fast scale would fill whole
    matrices with them.
    """
    return 0.75 * math.log(torch.finfo(dtype).tiny)


def decay_at(rates: Tensor, lag: Tensor) -> Tensor:
    """exp(rates lag) [..., H, S] for lag [...]."""
    exponent = rates * lag[..., None, None]
    return exponent.exp().masked_fill_(exponent < least_exponent(rates.dtype), 0)
