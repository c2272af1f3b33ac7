"""Full causal attention: every token kept, or the last so many."""

import torch
from torch import Tensor, nn

from vort.memories.interface import Memory, MemoryInputs, MemoryOutput, State
from vort.ops.local_attention.local import LocalState, attend_locally

__all__ = ["SoftmaxMemory"]


class SoftmaxMemory(Memory):
    """Softmax attention over the whole past, its cache growing by one entry with every token.

    Args:
        num_heads: query heads.
        head_dim: size of a head.
        num_key_value_heads: key and value heads.
        cache_size: keep this many tokens and no more, for comparisons at equal state size.
        rope_base: base of RoPE; None: no RoPE.

    >>> q, k, v = torch.randn(3, 1, 5, 2, 8)
    >>> memory = SoftmaxMemory(2, 8)
    >>> memory(MemoryInputs(torch.randn(1, 5, 16), q, k, v)).output.shape
    torch.Size([1, 5, 2, 8])
    >>> memory.state_size(1000)
    32000
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_key_value_heads: int | None = None,
        *,
        cache_size: int | None = None,
        rope_base: float | None = 10000.0,
    ) -> None:
        super().__init__()
        if cache_size is not None and cache_size < 1:
            raise ValueError(f"cache_size must be at least 1, or None to grow, got {cache_size}")
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.num_key_value_heads = num_heads if num_key_value_heads is None else num_key_value_heads
        self.cache_size = cache_size
        self.rope_base = rope_base

    def forward(
        self, inputs: MemoryInputs, state: State | None = None, *, output_state: bool = False
    ) -> MemoryOutput:
        """Attention to the past; see `Memory`."""
        plain = state is None and inputs.padding is None and inputs.cu_seqlens is None
        if plain and not output_state and self.cache_size is None:
            return MemoryOutput(self._whole(inputs))
        padding = inputs.padding
        past = self._room(inputs, state)
        # Attention within a window that everything fits into.
        window = inputs.q.shape[1] if past is None else past.k.shape[1]
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
        from vort.ops.local_attention import apply_rope

        q, k = inputs.q, inputs.k
        if self.rope_base is not None:
            position = torch.arange(q.shape[1], device=q.device)
            q, k = (apply_rope(x, position, self.rope_base) for x in (q, k))
        q, k, v = (x.transpose(1, 2) for x in (q, k, inputs.v))
        grouped = q.shape[1] != k.shape[1]
        o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return o.transpose(1, 2)

    def state_size(self, length: int = 0) -> int:
        """A key and a value for each token kept."""
        kept = length if self.cache_size is None else self.cache_size
        return 2 * kept * self.num_key_value_heads * self.head_dim
