"""The retrieval loss of a model's own memories: what each layer asked, kept and weighed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from vort.memories import MemoryInputs, RetentionMemory
from vort.plasticity.loss import retrieval_loss
from vort.plasticity.retrievals import Retrievals

__all__ = ["memory_features", "memory_retrieval_loss", "record_memories"]


@contextmanager
def record_memories(model: nn.Module) -> Iterator[list[tuple[RetentionMemory, MemoryInputs]]]:
    """A list that fills, as the model runs, with every layer's memory and what it was given.

    Layers stand in the order in which they ran. Gradients flow through what is recorded, so a loss
    made from it trains the model.

    >>> import torch
    >>> from vort.layers import VortAttention
    >>> layer = VortAttention(hidden_size=16, num_attention_heads=2, horizon=1000)
    >>> with record_memories(layer) as found:
    ...     _ = layer(torch.randn(1, 10, 16))
    >>> [inputs.q.shape for memory, inputs in found]
    [torch.Size([1, 10, 2, 8])]
    """
    found: list[tuple[RetentionMemory, MemoryInputs]] = []

    def keep(memory: nn.Module, given: tuple[Any, ...]) -> None:
        assert isinstance(memory, RetentionMemory)
        found.append((memory, given[0]))

    memories = [module for module in model.modules() if isinstance(module, RetentionMemory)]
    if not memories:
        kind = type(model).__name__
        raise ValueError(f"model must have a RetentionMemory in some layer, got {kind} without one")
    hooks = [memory.register_forward_pre_hook(keep) for memory in memories]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def memory_retrieval_loss(
    memory: RetentionMemory, inputs: MemoryInputs, retrievals: Retrievals
) -> Tensor:
    """L_ret of one layer, `[B, H]`: eq. retrieval-loss with the weights that its memory applies.

    Similarity is that of the memory's feature map (the paper's exp(q . k / sqrt(d_k)) for FAVOR+,
    but for its noise), so time and memory are linear in T; write gate and read weights count where
    the memory has them.

    Args:
        memory: e.g. `layer.memory` of a `VortAttention`; its features must be positive.
        inputs: what it was given, from `record_memories`; no padding, one sequence a row.
        retrievals: who asks for what.

    >>> import torch
    >>> from vort.layers import VortAttention
    >>> layer = VortAttention(hidden_size=16, num_attention_heads=2, horizon=1000)
    >>> with record_memories(layer) as found:
    ...     _ = layer(torch.randn(1, 4, 16))
    >>> asked = Retrievals.of(torch.tensor([[-1, -1, -1, 0]]))
    >>> [memory_retrieval_loss(*each, asked).shape for each in found]
    [torch.Size([1, 2])]
    """
    routing = memory.route(inputs)
    return retrieval_loss(
        *memory_features(memory, inputs),
        routing.write,
        routing.log_decay,
        retrievals,
        read=routing.read,
        similarity="features",
    )


def memory_features(memory: RetentionMemory, inputs: MemoryInputs) -> tuple[Tensor, Tensor]:
    """Features of queries and keys, `[B, T, H, K]` each, whose products a memory takes as similar.

    For `retrieval_loss` and `refine_orders` with `similarity="features"`; arguments as for
    `memory_retrieval_loss`. Queries are right up to a factor of their own, which cancels in p.

    >>> import torch
    >>> from vort.layers import VortAttention
    >>> layer = VortAttention(hidden_size=16, num_attention_heads=2, horizon=1000)
    >>> with record_memories(layer) as found:
    ...     _ = layer(torch.randn(1, 4, 16))
    >>> [x.shape[:3] for x in memory_features(*found[0])]
    [torch.Size([1, 4, 2]), torch.Size([1, 4, 2])]
    """
    if not memory.key_map.is_positive:
        kind = type(memory.key_map).__name__
        raise ValueError(f"memory must have positive features for p to be a share, got {kind}")
    if inputs.padding is not None or inputs.cu_seqlens is not None:
        raise ValueError("inputs must be whole rows, got padded or packed sequences")
    given = inputs.with_all_heads()
    query_map = memory.key_map if memory.query_map is None else memory.query_map
    return query_map.map_query(given.q), memory.key_map(given.k)
