"""How large each experiment is at each scale: tasks, models, training."""

from typing import Any

from vort.lab.experiments.cell import Scale

__all__ = ["RECALL", "RECALL_TRAINING", "Size", "recall_config", "sized"]

Size = dict[str, Any]

# One layer that does nothing but retrieve: no window, no convolution, no positions. A token of the
# recall tasks shows its key and its label at once, so neighbours have nothing to add.
_BARE: Size = {
    "num_hidden_layers": 1,
    "sliding_window": 0,
    "use_entropy": False,
    "conv_size": 0,
    "rope_theta": None,
    "tie_word_embeddings": False,
}

RECALL: dict[Scale, Size] = {
    "laptop": {
        **_BARE,
        "hidden_size": 64,
        "num_attention_heads": 1,
        "head_dim": 32,
        "num_features": 32,
        "intermediate_size": 64,
        "num_scales": 8,
        "horizon": 1000,
    },
    "paper": {
        **_BARE,
        "hidden_size": 128,
        "num_attention_heads": 2,
        "head_dim": 64,
        "num_features": 64,
        "intermediate_size": 256,
        "num_scales": 12,
        "horizon": 10_000,
        # Both heads for all lags; heads that begin apart leave long ones to one of them.
        "order_start": 0.7,
    },
}

# The paper's K = 10 banks of S = 15 terms are 136 states; at laptop size 4 of 8 are 25.
_BANKS: dict[Scale, Size] = {
    "laptop": {"num_banks": 4, "num_scales": 8},
    "paper": {"num_banks": 10, "num_scales": 15},
}


# The paper's S = 15 for one order; at laptop size as many as VORT, within 0.4 % of every order.
POWER_LAW_TERMS: dict[Scale, int] = {"laptop": 8, "paper": 15}


RECALL_TRAINING: dict[Scale, Size] = {
    "laptop": {"steps": 160, "batch_size": 8, "evaluation_sequences": 32},
    # 20 epochs of 5,000 sequences.
    "paper": {
        "steps": 3125,
        "batch_size": 32,
        "evaluation_sequences": 100,
        "checkpoint_every": 1000,
        "workers": 3,
    },
}


def sized(scale: Scale, sizes: Size, banks: Size, settings: Size) -> Size:
    """Settings of a row at a scale: its sizes, and as many scales as its kernel takes there.

    banks: sizes of rows that route to banks.
    """
    own: Size = {}
    if settings.get("routing") == "banks":
        own = banks
    elif settings.get("memory") == "uniform_power_law":
        own = {"num_scales": POWER_LAW_TERMS[scale]}
    elif settings.get("memory") == "mixture":
        own = {"num_scales": 5}
    return {**sizes, **own, **settings}


def recall_config(scale: Scale, settings: Size) -> Size:
    """Settings of a model of the recall tables, from what its row says."""
    return sized(scale, RECALL[scale], _BANKS[scale], settings)
