"""The retrieval loss of a model's own memories, by itself and as a part of training."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vort.memories import MemoryInputs, RetentionMemory
from vort.plasticity.loss import retrieval_loss
from vort.plasticity.retrievals import Retrievals

__all__ = [
    "memory_features",
    "memory_retrieval_loss",
    "model_retrieval_loss",
    "record_memories",
    "retrieval_objective",
]

FindSources = Callable[[Tensor], Tensor]


@contextmanager
def record_memories(model: nn.Module) -> Iterator[list[tuple[RetentionMemory, MemoryInputs]]]:
    """A list that fills, as the model runs, with every layer's memory and what it was given.

    Layers stand in the order in which they ran. Gradients flow through what is recorded, so a loss
    made from it trains the model.

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


def retrieval_objective(
    weight: float = 0.1,
    *,
    sources: FindSources | None = None,
    num_classes: int | None = None,
    layers: Collection[int] | None = None,
) -> Callable[[nn.Module, dict[str, Tensor]], Tensor]:
    """An `objective` for `vort.lab.training.train`: cross-entropy + weight · L_ret.

    L_ret is the mean of -log p_{i*(t), t} over queries, heads and layers (eq. retrieval-loss is
    the sum, whose size would grow with the task). Nothing says what any order should be: orders
    move because sources must win the retrieval, and the router learns which tokens those are.

    Args:
        weight: of L_ret; 0 leaves it out.
        sources: from tokens `[B, T]` to i*(t) `[B, T]`, -1 where nothing is asked, as
            `sources_by_key(task.vocabulary)` does. Not needed where batches bring `sources`.
        num_classes: cut logits off here, as `Scorer` does; None: the whole vocabulary.
        layers: which layers must retrieve; None: all.

    >>> from vort.models import VortConfig, VortForCausalLM
    >>> from vort.lab.tasks import LabelCopy, sources_by_key
    >>> from vort.lab.training import TrainingConfig, train
    >>> task = LabelCopy(length=64, entities=2, mentions=2, names=4, labels=2, fillers=4)
    >>> sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    >>> model = VortForCausalLM(VortConfig(vocab_size=task.vocab_size, horizon=1000, **sizes))
    >>> objective = retrieval_objective(sources=sources_by_key(task.vocabulary))
    >>> config = TrainingConfig(steps=2, batch_size=2, test_sequences=2, progress=False)
    >>> result = train(model, task, config, objective=objective)
    """
    if not 0 <= weight < float("inf"):
        raise ValueError(f"weight must be at least 0 and finite, got {weight}")

    def objective(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        whole: Any = model
        given: dict[str, Any] = {"use_cache": False}
        if "entity_mask" in batch and whole.base_model.needs_entity:
            given["entity_mask"] = batch["entity_mask"]
        with record_memories(model) as found:
            hidden = whole.base_model(input_ids=batch["input_ids"], **given)[0]
        logits = whole.get_output_embeddings()(hidden.flatten(0, 1)[batch["positions"]])
        loss = nn.functional.cross_entropy(logits[:, :num_classes].float(), batch["targets"])
        if weight == 0:
            return loss
        retrievals = Retrievals.of(_sources(batch, sources))
        every = range(len(found))
        wanted = every if layers is None else layers
        if not wanted or not set(wanted) <= set(every):
            raise ValueError(f"layers must name some of 0 ... {len(found) - 1}, got {layers}")
        kept = [each for n, each in enumerate(found) if n in wanted]
        losses = [memory_retrieval_loss(*each, retrievals) for each in kept]
        return loss + weight * _mean(losses, retrievals)

    return objective


@torch.no_grad()
def model_retrieval_loss(model: nn.Module, input_ids: Tensor, sources: Tensor) -> list[float]:
    """Mean -log p_{i*(t), t} of each layer of a model on tokens `[B, T]`; exp(-it) is a typical p.

    >>> from vort.models import VortConfig, VortModel
    >>> model = VortModel(VortConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=1))
    >>> tokens = torch.randint(256, (1, 5))
    >>> len(model_retrieval_loss(model, tokens, torch.tensor([[-1, -1, 0, -1, 1]])))
    2
    """
    with record_memories(model) as found:
        model(input_ids=input_ids, use_cache=False)
    retrievals = Retrievals.of(sources)
    return [float(_mean([memory_retrieval_loss(*each, retrievals)], retrievals)) for each in found]


def _mean(losses: list[Tensor], retrievals: Retrievals) -> Tensor:
    """From sums `[B, H]` of each layer to the mean over layers, heads and queries."""
    every = torch.stack([loss.mean(1).sum() for loss in losses]).mean()
    return every / max(retrievals.total, 1)


def _sources(batch: dict[str, Tensor], find: FindSources | None) -> Tensor:
    if find is not None:
        return find(batch["input_ids"])
    if "sources" not in batch:
        raise ValueError(
            "sources must be given where batches have none, e.g. sources_by_key(task.vocabulary); "
            f"this batch has {sorted(batch)}"
        )
    return batch["sources"]
