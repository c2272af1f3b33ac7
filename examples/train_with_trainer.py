"""Train on a text with Hugging Face's `Trainer`, on one device or many.

    python examples/train_with_trainer.py --text book.txt --out run
    torchrun --nproc_per_node 8 examples/train_with_trainer.py --text book.txt --out run
    torchrun --nproc_per_node 8 examples/train_with_trainer.py --text book.txt --out run --shard

The first is one process, the second data parallel (DDP), the third FSDP2 on GPUs. Mixed precision,
accumulation, clipping, checkpoints and resuming are Trainer's own; VORT is a model like any other.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from vort import ByteTokenizer, VortConfig, VortForCausalLM

options = argparse.ArgumentParser()
options.add_argument("--text", type=Path, required=True)
options.add_argument("--out", type=Path, required=True)
options.add_argument("--length", type=int, default=1024)
options.add_argument("--steps", type=int, default=100)
options.add_argument("--width", type=int, default=256)
options.add_argument("--shard", action="store_true")


class Windows(Dataset):
    """Windows of a text side by side. A byte is a token, so the file itself is memory-mapped."""

    def __init__(self, file: Path, length: int) -> None:
        self.tokens, self.length = np.memmap(file, np.uint8, mode="r"), length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        window = self.tokens[number * self.length : (number + 1) * self.length]
        row = torch.from_numpy(window.astype(np.int64))
        return {"input_ids": row, "labels": row}


def main() -> None:
    given = options.parse_args()
    bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    sharding = {"version": 2, "transformer_layer_cls_to_wrap": ["VortBlock"]}
    arguments = TrainingArguments(
        output_dir=str(given.out),
        max_steps=given.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        warmup_steps=given.steps // 20,
        max_grad_norm=1.0,
        bf16=bf16,
        logging_steps=10,
        save_steps=50,
        save_total_limit=2,
        report_to="none",
        ddp_find_unused_parameters=False,
        **({"fsdp": "full_shard auto_wrap", "fsdp_config": sharding} if given.shard else {}),
    )
    torch.manual_seed(0)
    config = VortConfig(hidden_size=given.width, num_attention_heads=given.width // 64)
    windows, tokenizer = Windows(given.text, given.length), ByteTokenizer()
    trainer = Trainer(VortForCausalLM(config), arguments, train_dataset=windows)
    last = get_last_checkpoint(given.out) if given.out.is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model(str(given.out / "model"))  # for from_pretrained and `vort generate`
    if trainer.is_world_process_zero():
        tokenizer.save_pretrained(given.out / "model")


if __name__ == "__main__":
    main()
