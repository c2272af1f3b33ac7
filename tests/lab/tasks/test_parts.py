"""Embeddings of tokens that show several things."""

import pytest
import torch

from vort.lab.tasks import MQAR, PartsEmbedding, ZipfRetrieval, embed_parts
from vort.lab.tasks.parts import KeyVocabulary

WORDS = KeyVocabulary(keys=5, labels=3, fillers=2)


def test_anchor_and_query_share_their_key_and_differ_in_the_label() -> None:
    parts = WORDS.parts()
    assert parts.shape == (WORDS.size, 2)
    for key in range(5):
        query = parts[WORDS.query(key)]
        for label in range(3):
            anchor = parts[WORDS.anchor(key, label)]
            assert anchor[0] == query[0]
            assert anchor[1] == label != query[1]


def test_no_two_tokens_show_the_same() -> None:
    assert len(WORDS.parts().unique(dim=0)) == WORDS.size


def test_a_vector_is_the_sum_over_parts_and_so_is_the_gradient() -> None:
    embedding = PartsEmbedding(WORDS.parts(), 4)
    token = WORDS.anchor(2, 1)
    key, label = WORDS.parts()[token].tolist()
    vectors = embedding.vectors.weight
    found = embedding(torch.tensor([token]))
    assert torch.allclose(found[0], vectors[key] + vectors[label])
    found.sum().backward()
    touched = vectors.grad.abs().sum(1).nonzero().flatten().tolist()
    assert sorted(touched) == sorted([key, label])


def test_a_hugging_face_model_takes_it_in_place_of_its_own() -> None:
    models = pytest.importorskip("vort.models")
    task = ZipfRetrieval(length=64, pairs=4, keys=8)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = models.VortForCausalLM(models.VortConfig(vocab_size=task.vocab_size, **sizes))
    embed_parts(model, task)
    assert isinstance(model.get_input_embeddings(), PartsEmbedding)
    assert model(task.batch("train", [0])["input_ids"]).logits.shape == (1, 64, task.vocab_size)


def test_tasks_without_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="task 'mqar' has no parts"):
        embed_parts(torch.nn.Module(), MQAR())
