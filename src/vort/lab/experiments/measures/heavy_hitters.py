"""A trained softmax model under H2O's cache policy."""

from typing import Any

from vort.lab.experiments.measures.lags import by_lag

__all__ = ["heavy_hitters"]


def heavy_hitters(
    model: Any, task: Any, config: Any, *, state_numbers: int, sequences: int
) -> dict[str, Any]:
    """Test scores of a softmax model under H2O's cache policy, its state as large as given.

    Args:
        model: it is changed.
        task: as trained on.
        config: of the training.
        state_numbers: what decoding may keep for one sequence and layer; as many tokens as fit.
        sequences: of the test split; the policy goes token by token, which takes its time.
    """
    size = 0
    for block in model.model.layers:
        memory = block.self_attn.memory
        per_token = memory.num_heads * (2 * memory.head_dim + 2)
        budget = max(2, state_numbers // per_token)
        memory.keep_heavy_hitters(budget)
        size += memory.state_size()
    found = by_lag(model, task, config, sequences=sequences)
    return {**found, "budget": budget, "state_numbers": size}
