"""A task and models that train in a second on one core."""

import torch
from torch import Tensor, nn

from vort.lab.tasks import ZipfRetrieval
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
