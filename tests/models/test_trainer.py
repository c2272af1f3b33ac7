"""Hugging Face's Trainer on a model of ours: it trains, evaluates and goes on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)

from tests.models.cases import model_of, tokens
from vort.models import VortForCausalLM

pytest.importorskip("accelerate")


class Texts(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = tokens(1, 12, seed=index)[0]
        return {"input_ids": ids, "labels": ids.clone()}


def trainer_of(folder: Path, smoothing: float = 0.0, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=2,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        label_smoothing_factor=smoothing,
        save_strategy="no",
    )
    return Trainer(
        model_of(num_hidden_layers=1), arguments, train_dataset=Texts(), eval_dataset=Texts(),
        **options,
    )  # fmt: skip


def test_it_trains_and_evaluates(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.train()
    found = trainer.evaluate()
    with torch.no_grad():
        ids = torch.cat([tokens(1, 12, seed=index) for index in range(8)])
        expected = trainer.model(ids, labels=ids).loss.item()
    assert found["eval_loss"] == pytest.approx(expected, abs=1e-4)
    assert trainer.predict(Texts()).predictions.shape == (8, 12, 40)


@pytest.mark.parametrize("flash", [False, True])
def test_flattened_batches_score_as_padded_ones_do(flash: bool, tmp_path: Path) -> None:
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=flash, return_seq_idx=flash)
    flat, plain = trainer_of(tmp_path, data_collator=collator), trainer_of(tmp_path)
    loss, expected = flat.evaluate()["eval_loss"], plain.evaluate()["eval_loss"]
    assert loss == pytest.approx(expected, abs=1e-4)
    flat.train()


def test_smoothed_labels_are_those_of_the_next_token(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, smoothing=0.1)
    found = trainer.evaluate()["eval_loss"]
    ids = torch.cat([tokens(1, 12, seed=index) for index in range(8)])
    with torch.no_grad():
        scores = trainer.model(ids).logits[:, :-1].flatten(0, 1)
    expected = cross_entropy(scores, ids[:, 1:].flatten(), label_smoothing=0.1).item()
    assert found == pytest.approx(expected, abs=1e-4)
    auto: Any = AutoModelForCausalLM
    assert type(auto.from_config(trainer.model.config)) is VortForCausalLM
