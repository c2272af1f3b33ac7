"""The retrieval loss beside the task's own: plasticity as a part of training."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from vort.plasticity.memories import memory_retrieval_loss, record_memories
from vort.plasticity.retrievals import Retrievals

__all__ = ["model_retrieval_loss", "retrieval_objective"]

FindSources = Callable[[Tensor], Tensor]


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
        if "entity_mask" in batch:
            given["entity_mask"] = batch["entity_mask"]
        with record_memories(model) as found:
            hidden = whole.base_model(input_ids=batch["input_ids"], **given)[0]
        logits = whole.get_output_embeddings()(hidden.flatten(0, 1)[batch["positions"]])
        loss = nn.functional.cross_entropy(logits[:, :num_classes].float(), batch["targets"])
        if weight == 0:
            return loss
        retrievals = Retrievals.of(_sources(batch, sources))
        kept = [each for n, each in enumerate(found) if layers is None or n in layers]
        if not kept:
            raise ValueError(f"layers must name some of 0 ... {len(found) - 1}, got {layers}")
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
