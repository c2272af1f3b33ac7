"""Rows of the tables as models: embeddings and heads that fit the task, kernels that load fast."""

import pytest
import torch

from tests.lab.experiments.tiny import tiny
from vort.lab.experiments.models import build_model, few_configurations
from vort.lab.tasks import MQAR, Books, make_task


def test_the_head_has_a_row_for_each_class_and_tokens_are_sums_of_parts() -> None:
    task = make_task(**tiny().task)
    model = build_model(task, tiny().config, seed=0)
    assert model.get_output_embeddings().weight.shape[0] == task.num_classes == 16
    assert model(torch.zeros(1, 4, dtype=torch.long)).logits.shape[-1] == 16


def test_weights_are_those_of_the_seed() -> None:
    task = make_task(**tiny().task)
    first, again, other = (build_model(task, tiny().config, seed) for seed in (0, 0, 1))
    same = [torch.equal(x, y) for x, y in zip(first.parameters(), again.parameters(), strict=True)]
    assert all(same)
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


@pytest.mark.parametrize("task", [MQAR(length=64, pairs=8, vocabulary=64), Books(length=64)])
def test_tasks_without_parts_have_a_plain_embedding(task) -> None:
    model = build_model(task, tiny().config, seed=0)
    assert model.get_input_embeddings().weight.shape[0] == task.vocab_size
    assert model.get_output_embeddings().weight.shape[0] == task.num_classes


def test_kernels_loaded_for_a_baseline_try_few_configurations() -> None:
    triton = pytest.importorskip("triton")

    def tuned(count: int) -> int:
        kernel = triton.jit(_nothing)
        configs = [triton.Config({}, num_warps=1 << n) for n in range(count)]
        return len(triton.autotune(configs, key=[])(kernel).configs)

    with few_configurations(3):
        assert [tuned(n) for n in (1, 3, 4, 10)] == [1, 3, 2, 3]
    assert tuned(10) == 10


def _nothing(x):  # type: ignore[no-untyped-def]
    pass
