"""An input embedding for tokens that show several things at once."""

from typing import Any

from torch import Tensor, nn

from vort.lab.tasks.task import Task

__all__ = ["PartsEmbedding", "embed_parts"]


class PartsEmbedding(nn.Module):
    """The sum of the embeddings of a token's parts, in the place of an `nn.Embedding`.

    A token that shows (key, label) then has a vector of the key plus a vector of the label. With a
    free vector for each of the 256 x 16 pairs, every pair would have to be learned by itself: the
    tasks would measure how long that takes, not what a memory keeps.

    Args:
        parts: `[vocab_size, P]` part numbers of every token.
        hidden_size: size of a vector.
        std: standard deviation of initial vectors.

    >>> import torch
    >>> embedding = PartsEmbedding(torch.tensor([[0, 1], [0, 2]]), hidden_size=4)
    >>> embedding(torch.tensor([[0, 1, 1]])).shape
    torch.Size([1, 3, 4])
    """

    parts: Tensor

    def __init__(self, parts: Tensor, hidden_size: int, std: float = 0.02) -> None:
        super().__init__()
        self.register_buffer("parts", parts, persistent=False)
        self.vectors = nn.Embedding(int(parts.max()) + 1, hidden_size)
        nn.init.normal_(self.vectors.weight, std=std)

    @property
    def weight(self) -> Tensor:
        """`[vocab_size, hidden_size]`: the vectors of all tokens."""
        found: Tensor = self.vectors(self.parts).sum(1)
        return found

    def forward(self, input_ids: Tensor) -> Tensor:
        """`[..., hidden_size]` for tokens `[...]`."""
        # Summing once for the vocabulary is cheaper than for every position of a batch.
        return nn.functional.embedding(input_ids, self.weight)


def embed_parts(model: Any, task: Task) -> None:
    """Give a Hugging Face model the input embedding of a task whose tokens have parts; in place.

    Output embeddings tied to the old input embedding keep it as a matrix of their own.
    """
    if task.parts is None:
        raise ValueError(f"task {task.name!r} has no parts: its tokens are what they show")
    old = model.get_input_embeddings()
    std = getattr(model.config, "initializer_range", 0.02)
    new = PartsEmbedding(task.parts, old.embedding_dim, std)
    model.set_input_embeddings(new.to(old.weight.device, old.weight.dtype))
    model.config.tie_word_embeddings = False
