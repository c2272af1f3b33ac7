"""Claims about the kernels, for Triton's interpreter; see `tests.ops.interpreter`."""

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.ops.decoding.cases import CHECKS
from tests.ops.interpreter import check_claim, kernels_everywhere

BOUND = 5e-6


def every_output_and_state_equals_exact() -> None:
    for seed, (name, check) in enumerate(CHECKS.items()):
        errors = check(torch.float32, "cpu", seed)
        assert all(error <= BOUND for error in errors.values()), (name, errors)


def a_model_steps_in_place_as_its_forward_says() -> None:
    """Logits of whole models token by token, every block in six launches."""
    for changes in ({}, {"num_key_value_heads": 4, "use_entropy": False, "sliding_window": 0}):
        steps, whole, taken = _steps(torch.float32, **changes)
        assert taken == 3, changes
        assert (steps - whole).norm() <= 2e-6 * whole.norm(), changes


def states_in_bfloat16_step_in_place_too() -> None:
    steps, whole, taken = _steps(torch.bfloat16)
    assert taken == 3
    assert 0 < (steps - whole).norm() <= 1e-2 * whole.norm()


def what_kernels_do_not_know_steps_by_its_modules() -> None:
    steps, whole, taken = _steps(torch.float32, feature_map="elu")
    assert taken == 0
    assert (steps - whole).norm() <= 2e-6 * whole.norm()


@torch.no_grad()
def _steps(state_dtype: torch.dtype, **changes: Any) -> tuple[Tensor, Tensor, int]:
    """Logits of three steps in place, those of the whole sequence, and how many were fused."""
    from vort.models import VortConfig, VortForCausalLM, block

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 40,
        "num_key_value_heads": 2, "sliding_window": 5, "horizon": 100, "num_scales": 3,
        "output_gate": True, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    }  # fmt: skip
    model = VortForCausalLM(VortConfig(**(sizes | changes))).eval()
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    ids = torch.randint(40, (2, 12))
    whole = model(ids, use_cache=False).logits[:, 9:]
    cache = model.new_cache(static=True, state_dtype=state_dtype)
    model(ids[:, :9], past_key_values=cache, use_cache=True)
    cache.in_place = True
    places = {n: x.data_ptr() for n, x in cache.states[0].items()}
    taken, parts = [], []
    step = block.attention_step

    def watched(*given: Any) -> Tensor | None:
        found = step(*given)
        taken.append(found is not None)
        return found

    with kernels_everywhere(True), mock.patch.object(block, "attention_step", watched):
        for t in range(9, 12):
            hidden = model.model(ids[:, t : t + 1], past_key_values=cache, use_cache=True)[0]
            parts.append(model.lm_head(hidden))
    assert places == {n: x.data_ptr() for n, x in cache.states[0].items()}
    return torch.cat(parts, 1), whole, sum(taken)


if __name__ == "__main__":
    check_claim()
