"""Cells that take a second or two."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vort.lab.experiments.cell import Cell

TASK = {
    "name": "zipf_retrieval",
    "length": 64,
    "pairs": 4,
    "keys": 8,
    "bounds": (4, 16),
    "validation_sequences": 4,
    "test_sequences": 8,
}
CONFIG = {
    "hidden_size": 16,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "intermediate_size": 16,
    "sliding_window": 0,
    "use_entropy": False,
    "conv_size": 0,
    "num_scales": 4,
    "horizon": 100,
    "tie_word_embeddings": False,
}
TRAINING = {"steps": 3, "batch_size": 4, "learning_rate": 1e-3}


def tiny(model: str = "vort", seed: int = 0, **changes: Any) -> Cell:
    settings: dict[str, Any] = {
        "experiment": "pilot",
        "size": "laptop",
        "model": model,
        "seed": seed,
        "task": {**TASK, "seed": seed},
        "config": CONFIG,
        "training": TRAINING,
    }
    return Cell(**{**settings, **changes})


def small_books(cell: Cell, source: Path, config: dict[str, Any], **training: Any) -> Cell:
    """A cell on books at two steps of two rows of 32 characters, with these settings."""
    task = {**cell.task, "source": str(source), "length": 32, "bounds": [16]}
    config = {**cell.config, "sliding_window": 8, **config}
    few = {"steps": 2, "batch_size": 2, "evaluation_sequences": 2, "workers": 0}
    return replace(
        cell,
        task={**task, "validation_files": 1},
        config=config,
        training={**cell.training, **few, **training},
    )


def books(folder: Path) -> Path:
    """A folder of texts of random letters: test books of 50, 300, 700 and 2,500 characters."""
    generator = np.random.default_rng(0)
    for split, sizes in (("train", (900, 900, 900)), ("test", (50, 300, 700, 2500))):
        (folder / split).mkdir(parents=True)
        for number, size in enumerate(sizes):
            letters = generator.integers(97, 123, size).astype(np.uint8).tobytes()
            (folder / split / f"{number}.txt").write_bytes(letters)
    return folder
