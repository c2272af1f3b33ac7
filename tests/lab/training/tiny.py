"""A task and models that train in a second on one core."""

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor, nn

from vort.lab.tasks import IGNORED, Batch, Split, ZipfRetrieval
from vort.lab.training import TrainingConfig

TASK = ZipfRetrieval(
    length=32,
    pairs=3,
    keys=4,
    labels=4,
    fillers=2,
    bounds=(4, 16),
    train_sequences=64,
    validation_sequences=20,
    test_sequences=30,
)


class Uneven(ZipfRetrieval):
    """Of four sequences one asks nothing, one a single question, and two as many as all do."""

    def batch(self, split: Split, indices: Sequence[int]) -> Batch:
        found = super().batch(split, indices)
        for row, index in enumerate(indices):
            asked = (found["labels"][row] != IGNORED).nonzero().squeeze(1)
            found["labels"][row, asked[index % 4 :] if index % 4 < 2 else asked[:0]] = IGNORED
        return found


UNEVEN = Uneven(**{field.name: getattr(TASK, field.name) for field in fields(TASK) if field.init})


class Tiny(nn.Module):
    """A recurrent network with dropout, so that random numbers matter."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TASK.vocab_size, 16)
        self.memory = nn.GRU(16, 16, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, TASK.num_classes)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.dropout(self.memory(self.embedding(input_ids))[0])
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def tiny(seed: int = 0, dropout: float = 0.1) -> Tiny:
    torch.manual_seed(seed)
    return Tiny(dropout)


def quick(**settings: object) -> TrainingConfig:
    defaults = {"steps": 6, "batch_size": 8, "learning_rate": 1e-2, "progress": False}
    return TrainingConfig.from_dict({**defaults, "evaluation_sequences": 20, **settings})


def weights(model: nn.Module) -> list[Tensor]:
    return [x.detach().clone() for x in model.parameters()]
