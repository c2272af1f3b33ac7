"""Full causal attention: every token kept, the last so many, or those attended to most (H2O)."""

from typing import Any

import torch
from torch import Tensor, nn

from vort.memories.interface import Memory, MemoryInputs, MemoryOutput, State
from vort.memories.settings import LayerSettings
from vort.ops.local_attention import apply_rope
from vort.ops.local_attention.block import MASKED
from vort.ops.local_attention.local import LocalState, attend_locally

__all__ = ["SoftmaxMemory"]


class SoftmaxMemory(Memory):
    """Softmax attention over the whole past, its cache growing by one entry with every token.

    `softmax_cache_size` keeps the last so many tokens and no more, for comparisons at equal state
    size. `softmax_heavy_hitters` keeps so many by H2O's policy, see `keep_heavy_hitters`.

    >>> q, k, v = torch.randn(3, 1, 50, 2, 8)
    >>> inputs = MemoryInputs(torch.randn(1, 50, 16), q, k, v)
    >>> memory = SoftmaxMemory(hidden_size=16, num_attention_heads=2).eval()
    >>> memory(inputs).output.shape, memory.state_size(1000)
    (torch.Size([1, 50, 2, 8]), 32000)
    >>> memory.keep_heavy_hitters(16)
    >>> memory(inputs, output_state=True).state["k"].shape, memory.state_size(1000)
    (torch.Size([1, 2, 16, 8]), 576)
    """

    def __init__(self, settings: LayerSettings | None = None, **options: Any) -> None:
        super().__init__(settings, **options)
        self.cache_size = self.settings.softmax_cache_size
        self.rope_base = self.settings.rope_theta
        self.heavy_hitters: int | None = None
        if self.settings.softmax_heavy_hitters is not None:
            self.keep_heavy_hitters(self.settings.softmax_heavy_hitters)

    def keep_heavy_hitters(self, budget: int) -> None:
        """From now on, full attention in training and `budget` tokens a head at inference.

        When the cache is full, the token that has received the least attention so far leaves it,
        the most recent half of the budget excepted (Zhang et al. 2023). A policy for models
        trained with full attention.
        """
        if budget < 2:
            raise ValueError(f"budget must be at least 2 tokens, got {budget}")
        if self.num_key_value_heads != self.num_heads:
            raise ValueError(
                "every head keeps tokens of its own: num_key_value_heads must be "
                f"num_attention_heads = {self.num_heads}, got {self.num_key_value_heads}"
            )
        self.heavy_hitters = budget

    def forward(
        self, inputs: MemoryInputs, state: State | None = None, *, output_state: bool = False
    ) -> MemoryOutput:
        """Attention to the past; see `Memory`."""
        if self.heavy_hitters is not None and not (
            self.training and state is None and not output_state
        ):
            return self._among_heavy_hitters(inputs, state, output_state)
        plain = state is None and inputs.padding is None and inputs.cu_seqlens is None
        if plain and not output_state and self.cache_size is None:
            return MemoryOutput(self._whole(inputs))
        padding = inputs.padding
        past = self._room(inputs, state)
        # Attention within a window that everything fits into; of no tokens too.
        window = max(inputs.q.shape[1], 1) if past is None else past.k.shape[1]
        output, _, after = attend_locally(
            inputs.q,
            inputs.k,
            inputs.v,
            window if self.cache_size is None else self.cache_size,
            rope_base=self.rope_base,
            state=past,
            real=None if padding is None else padding.real,
            lengths=None if padding is None else padding.lengths,
            cu_seqlens=inputs.cu_seqlens,
            output_state=output_state,
        )
        return MemoryOutput(output, None if after is None else after._asdict())

    def _among_heavy_hitters(
        self, inputs: MemoryInputs, state: State | None, output_state: bool
    ) -> MemoryOutput:
        """Attention to what the cache holds, token by token."""
        if inputs.cu_seqlens is not None:
            raise ValueError("heavy hitters take one sequence a row: cu_seqlens must be None")
        cache = _HeavyHitters(self, inputs, state)
        outputs = [cache.step(t) for t in range(inputs.q.shape[1])]
        output = torch.stack(outputs, 1) if outputs else torch.empty_like(inputs.v)
        return MemoryOutput(output, cache.state() if output_state else None)

    def _room(self, inputs: MemoryInputs, state: State | None) -> LocalState | None:
        """The state, with empty slots behind for the tokens to come where the cache grows."""
        if state is None:
            return None
        past = LocalState(state["k"], state["v"], state["seen"])
        if self.cache_size is not None:
            return past
        new = inputs.q.shape[1]
        k, v = (nn.functional.pad(x, (0, 0, 0, 0, 0, new)) for x in (past.k, past.v))
        return LocalState(k, v, past.seen)

    def _whole(self, inputs: MemoryInputs) -> Tensor:
        """PyTorch's fused attention, for the case it covers."""
        q, k = inputs.q, inputs.k
        if self.rope_base is not None:
            position = torch.arange(q.shape[1], device=q.device)
            q, k = (apply_rope(x, position, self.rope_base) for x in (q, k))
        q, k, v = (x.transpose(1, 2) for x in (q, k, inputs.v))
        grouped = q.shape[1] != k.shape[1]
        o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return o.transpose(1, 2)

    def state_size(self, length: int = 0) -> int:
        """A key and a value for each token kept.

        Of heavy hitters also a score and a position, for slots that exist from the start.
        """
        if self.heavy_hitters is not None:
            return self.heavy_hitters * self.num_heads * (2 * self.head_dim + 2)
        kept = length if self.cache_size is None else self.cache_size
        return 2 * kept * self.num_key_value_heads * self.head_dim


class _HeavyHitters:
    """Keys, values, attention received and positions of the kept tokens, `[B, H, budget, ...]`."""

    def __init__(self, memory: SoftmaxMemory, inputs: MemoryInputs, state: State | None) -> None:
        q, k, v = inputs.q, inputs.k, inputs.v
        batch, length, heads, size = k.shape
        budget = memory.heavy_hitters
        assert budget is not None
        slots = (batch, heads, budget)
        if state is None:
            self.k, self.v = k.new_zeros(*slots, size), v.new_zeros(*slots, v.shape[-1])
            self.score = torch.zeros(slots, device=k.device)
            self.position = torch.full(slots, -1, device=k.device)
            self.seen = torch.zeros(batch, dtype=torch.int64, device=k.device)
        else:
            self.k, self.v, self.seen = state["k"].clone(), state["v"].clone(), state["seen"]
            self.score, held = state["score"].clone(), state["position"]
            # A cache that was reset in place holds zeros.
            self.position = held.masked_fill(self.seen[:, None, None] == 0, -1)
        if memory.rope_base is not None:
            position = self.seen[:, None] + torch.arange(length, device=k.device)
            q, k = (apply_rope(x, position, memory.rope_base) for x in (q, k))
        self.rows = q * size**-0.5, k, v
        self.real = None if inputs.padding is None else inputs.padding.real
        self.recent = budget // 2

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
        empty = self.position < 0
        # Where a row has seen nothing but padding all slots are empty.
        weights = logits.masked_fill(empty, MASKED).softmax(-1).masked_fill(empty, 0)
        self.score = self.score + torch.where(real[:, None, None], weights, 0)
        self.seen = self.seen + real
        return torch.einsum("bhs,bhsv->bhv", weights.to(self.v.dtype), self.v)

    def _free_slot(self) -> Tensor:
        """`[B, H, 1]`: an empty slot, else that of the lightest token that is not recent."""
        recent = self.position >= self.seen[:, None, None] - self.recent
        rank = self.score.masked_fill(recent, torch.inf).masked_fill(self.position < 0, -1)
        return rank.argmin(-1, keepdim=True)

    def state(self) -> State:
        names = ("k", "v", "score", "position", "seen")
        return {name: getattr(self, name) for name in names}
