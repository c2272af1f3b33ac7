"""H2O: softmax attention whose cache keeps recent tokens and those that were attended to most."""

import torch
from torch import Tensor

from vort.memories.interface import MemoryInputs, MemoryOutput, State
from vort.memories.softmax import SoftmaxMemory
from vort.ops.local_attention import apply_rope

__all__ = ["HeavyHitterMemory"]


class HeavyHitterMemory(SoftmaxMemory):
    """Full attention in training; at inference a cache of `budget` tokens for each head.

    When the cache is full, the token that has received the least attention so far leaves it, the
    most recent half of the budget excepted (Zhang et al. 2023). A policy for models trained with
    full attention: set `softmax_heavy_hitters` in the configuration of such a model.

    Args:
        num_heads: query heads.
        head_dim: size of a head.
        num_key_value_heads: key and value heads.
        budget: tokens that each head keeps.
        rope_base: base of RoPE; None: no RoPE.

    >>> q, k, v = torch.randn(3, 1, 50, 2, 8)
    >>> memory = HeavyHitterMemory(2, 8, budget=16).eval()
    >>> found = memory(MemoryInputs(torch.randn(1, 50, 16), q, k, v), output_state=True)
    >>> found.state["k"].shape, memory.state_size(1000)
    (torch.Size([1, 2, 16, 8]), 576)
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_key_value_heads: int | None = None,
        *,
        budget: int,
        rope_base: float | None = 10000.0,
    ) -> None:
        super().__init__(num_heads, head_dim, num_key_value_heads, rope_base=rope_base)
        if budget < 2:
            raise ValueError(f"budget must be at least 2 tokens, got {budget}")
        if self.num_key_value_heads != num_heads:
            raise ValueError(
                "every head keeps tokens of its own: num_key_value_heads must be num_heads = "
                f"{num_heads}, got {num_key_value_heads}"
            )
        self.budget = budget

    def forward(
        self, inputs: MemoryInputs, state: State | None = None, *, output_state: bool = False
    ) -> MemoryOutput:
        """Full attention while training, else attention to what the cache holds; see `Memory`."""
        if self.training and state is None and not output_state:
            return super().forward(inputs)
        if inputs.cu_seqlens is not None:
            raise ValueError("heavy hitters take one sequence a row: cu_seqlens must be None")
        cache = _Cache(self, inputs, state)
        outputs = [cache.step(t) for t in range(inputs.q.shape[1])]
        return MemoryOutput(torch.stack(outputs, 1), cache.state() if output_state else None)

    def state_size(self, length: int = 0) -> int:
        """A key, a value, a score and a position for each slot; all slots exist from the start."""
        return self.budget * self.num_heads * (2 * self.head_dim + 2)


class _Cache:
    """Keys, values, attention received and positions of the kept tokens, `[B, H, budget, ...]`."""

    def __init__(
        self, memory: HeavyHitterMemory, inputs: MemoryInputs, state: State | None
    ) -> None:
        q, k, v = inputs.q, inputs.k, inputs.v
        batch, length, heads, size = k.shape
        slots = (batch, heads, memory.budget)
        if state is None:
            self.k, self.v = k.new_zeros(*slots, size), v.new_zeros(*slots, v.shape[-1])
            self.score = torch.zeros(slots, device=k.device)
            self.position = torch.full(slots, -1, device=k.device)
            self.seen = torch.zeros(batch, dtype=torch.int64, device=k.device)
        else:
            self.k, self.v, self.seen = state["k"].clone(), state["v"].clone(), state["seen"]
            self.score, self.position = state["score"].clone(), state["position"].clone()
        if memory.rope_base is not None:
            position = self.seen[:, None] + torch.arange(length, device=k.device)
            q, k = (apply_rope(x, position, memory.rope_base) for x in (q, k))
        self.rows = q * size**-0.5, k, v
        self.real = None if inputs.padding is None else inputs.padding.real
        self.recent = memory.budget // 2

    def step(self, t: int) -> Tensor:
        """Take in token t and return what it finds, `[B, H, V]`; rows with padding stay as is."""
        q, k, v = (x[:, t] for x in self.rows)
        real = (
            torch.ones_like(self.seen, dtype=torch.bool) if self.real is None else self.real[:, t]
        )
        slot = self._free_slot()
        chosen = torch.zeros_like(self.score, dtype=torch.bool).scatter_(2, slot, True)
        chosen &= real[:, None, None]
        self.k = torch.where(chosen.unsqueeze(-1), k.unsqueeze(2), self.k)
        self.v = torch.where(chosen.unsqueeze(-1), v.unsqueeze(2), self.v)
        self.score = self.score.masked_fill(chosen, 0)
        self.position = torch.where(chosen, self.seen[:, None, None], self.position)
        logits = torch.einsum("bhd,bhsd->bhs", q, self.k).float()
        weights = logits.masked_fill(self.position < 0, -torch.inf).softmax(-1)
        self.score = self.score + torch.where(real[:, None, None], weights, 0)
        self.seen = self.seen + real
        return torch.einsum("bhs,bhsv->bhv", weights.to(self.v.dtype), self.v)

    def _free_slot(self) -> Tensor:
        """`[B, H, 1]`: an empty slot, else that of the lightest token that is not recent."""
        recent = self.position >= self.seen[:, None, None] - self.recent
        rank = self.score.masked_fill(recent, torch.inf).masked_fill(self.position < 0, -1)
        return rank.argmin(-1, keepdim=True)

    def state(self) -> State:
        return {
            "k": self.k,
            "v": self.v,
            "score": self.score,
            "position": self.position,
            "seen": self.seen,
        }
