"""H2O's cache policy: exact while everything fits, a bounded cache afterwards."""

import pytest
import torch

from tests.memories.cases import inputs, made
from tests.models.cases import model_of, tokens
from vort.memories import MemoryInputs, SoftmaxMemory
from vort.models import VortConfig, VortForCausalLM
from vort.ops.padding import Padding


@pytest.mark.parametrize("rope_theta", [None, 10000.0])
def test_with_room_for_all_it_is_full_attention(rope_theta: float | None) -> None:
    given = inputs(20)
    full = made("softmax", rope_theta=rope_theta)(given).output
    memory = made("softmax", softmax_heavy_hitters=20, rope_theta=rope_theta).eval()
    kept = memory(given).output
    torch.testing.assert_close(kept, full, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_static_cache_that_was_reset_is_empty() -> None:
    model = model_of("softmax", softmax_heavy_hitters=6)
    cache = model.new_cache(static=True)
    model(tokens(2, 9, seed=1), past_key_values=cache, use_cache=True)
    cache.reset()
    ids = tokens(2, 12)
    found = model(ids, past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(found, model(ids).logits)


def test_pieces_with_a_state_equal_one_call() -> None:
    given = inputs(30)
    memory = made("softmax", softmax_heavy_hitters=6).eval()
    whole = memory(given).output
    state, parts = None, []
    for t in range(30):
        found = memory(given.at(t), state, output_state=True)
        state = found.state
        parts.append(found.output)
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_a_token_that_was_attended_to_outlives_the_window_and_others_do_not() -> None:
    length, budget = 40, 8
    k = torch.zeros(1, length, 1, 4)
    k[0, 3, 0, 0] = 10.0
    q = torch.zeros(1, length, 1, 4)
    q[..., 0] = 10.0
    v = torch.randn(1, length, 1, 4)
    memory = SoftmaxMemory(
        hidden_size=4, num_attention_heads=1, softmax_heavy_hitters=budget, rope_theta=None
    ).eval()
    state = memory(MemoryInputs(torch.zeros(1, length, 4), q, k, v), output_state=True).state
    positions = sorted(state["position"].flatten().tolist())
    assert 3 in positions
    assert positions[-budget // 2 :] == list(range(length - budget // 2, length))


def test_a_model_trained_with_full_attention_runs_under_the_policy() -> None:
    settings = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    full = VortForCausalLM(VortConfig(memory="softmax", **settings)).eval()
    kept = VortForCausalLM(VortConfig(memory="softmax", softmax_heavy_hitters=64, **settings))
    kept.load_state_dict(full.state_dict())
    kept.eval()
    tokens = torch.randint(256, (1, 40))
    torch.testing.assert_close(kept(tokens).logits, full(tokens).logits, rtol=1e-4, atol=1e-4)
    assert kept.generate(tokens, max_new_tokens=5, do_sample=False).shape == (1, 45)


def test_a_budget_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="softmax_heavy_hitters must be at least 2, got 1"):
        made("softmax", softmax_heavy_hitters=1)
    with pytest.raises(ValueError, match="budget must be at least 2"):
        made("softmax").keep_heavy_hitters(1)


def test_heads_that_share_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="num_key_value_heads must be num_attention_heads = 2"):
        made("softmax", softmax_heavy_hitters=4, num_key_value_heads=1)


def test_a_row_of_padding_alone_finds_nothing() -> None:
    given, real = inputs(5), torch.tensor([[False] * 5, [True] * 3 + [False] * 2])
    q, k, v = (x * real[..., None, None] for x in (given.q, given.k, given.v))
    padded = MemoryInputs(given.hidden_states, q, k, v, padding=Padding.of(real, 2, 5))
    memory = made("softmax", softmax_heavy_hitters=3).eval()
    found = memory(padded, output_state=True)
    assert torch.equal(found.output[0], torch.zeros(5, 2, 8))
    assert all(x.isfinite().all() for x in found.state.values())
