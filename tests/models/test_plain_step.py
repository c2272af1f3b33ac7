"""A token's step on a CPU: what the model would say, whole or not at all, and never of the past."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.models.cases import WINDOW, model_of, tokens
from vort.layers import ShortConvolution, plain_step
from vort.models import VortCache, VortForCausalLM, VortSession
from vort.models import decoding as models_decoding

LENGTH = 3 * WINDOW


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens that went by steps."""
    taken: list[int] = []
    call = plain_step.PlainStep.__call__

    def counted(self: Any, token: int, states: Any) -> Tensor:
        taken.append(token)
        return call(self, token, states)

    monkeypatch.setattr(plain_step.PlainStep, "__call__", counted)
    return taken


@torch.no_grad()
def logits_of(model: VortForCausalLM, ids: Tensor, prompt: int = 2) -> tuple[Tensor, VortCache]:
    """Logits after each token beyond the prompt, read one by one."""
    cache = model.new_cache()
    model(ids[:, :prompt], past_key_values=cache, use_cache=True)
    found = [
        model(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits[0, 0]
        for t in range(prompt, ids.shape[1])
    ]
    return torch.stack(found), cache


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"output_gate": True},
        {"use_entropy": False},
        {"rope_theta": None},
        {"sliding_window": 1},
        {"num_scales": 2},
    ],
    ids=str,
)
def test_steps_equal_the_whole_sequence(changes: dict[str, Any], made: list[int]) -> None:
    model, ids = model_of(**changes), tokens(1, LENGTH)
    found, cache = logits_of(model, ids)
    assert made == ids[0, 2:].tolist()
    with torch.no_grad():
        whole_cache = model.new_cache()
        whole = model(ids, past_key_values=whole_cache, use_cache=True).logits[0, 2:]
    torch.testing.assert_close(found, whole, atol=2e-5, rtol=2e-5)
    assert cache.get_seq_length() == LENGTH
    for index, state in whole_cache.states.items():
        for name, x in state.items():
            torch.testing.assert_close(cache.states[index][name], x, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("bias", [-200.0, 200.0])
@torch.no_grad()
def test_gates_and_orders_at_their_ends_are_the_models_and_warn_of_nothing(
    bias: float, made: list[int]
) -> None:
    model, ids = model_of(output_gate=True), tokens(1, LENGTH)
    for block in model.model.layers:
        block.self_attn.memory.router.order.bias.fill_(bias)  # an order of 1, or the smallest
        block.self_attn.memory.router.gates.write.bias.fill_(-bias / 10)
        block.self_attn.g_proj.weight.mul_(3000)
        block.mlp.gate_proj.weight.mul_(3000)
        block.mlp.down_proj.weight.div_(3000)
    with np.errstate(all="raise"):
        found, _ = logits_of(model, ids)
    assert made == ids[0, 2:].tolist()
    whole = model(ids).logits[0, 2:]
    torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_fast_scale_keeps_what_its_decay_leaves(
    made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = model_of(num_scales=16, horizon=1000), tokens(1, 3)
    rates = model.model.layers[0].self_attn.memory.router.log_decay(torch.device("cpu"))
    assert rates.min() < -11  # exp of that, as 1 less a float32, has three digits
    cache = model.new_cache()
    model(ids[:, :2], past_key_values=cache, use_cache=True)
    for state in cache.states.values():  # beside which a token writes next to nothing
        for name in ("memory.G", "memory.b"):
            state[name].fill_(1e12)
    caches = [cache, deepcopy(cache)]
    model(ids[:, 2:], past_key_values=caches[0], use_cache=True)
    monkeypatch.setattr(models_decoding, "plain_step_for", lambda *given: None)
    model(ids[:, 2:], past_key_values=caches[1], use_cache=True)
    assert len(made) == 1
    for index, state in caches[1].states.items():
        for name in ("memory.G", "memory.b"):
            torch.testing.assert_close(caches[0].states[index][name], state[name], msg=name)


@pytest.mark.parametrize(
    "changes",
    [
        {"memory": "mixture"},
        {"memory": "softmax"},
        {"memory": "paper"},
        {"normalizer": "none"},
        {"num_key_value_heads": 1},
        {"conv_size": 0},
        {"sliding_window": 0},
        {"write_gate": False},
        {"order_input": "values"},
        {"learn_basis": True},
        {"write_gain": "scale"},
        {"use_entity": True},
        {"attention_bias": True},
    ],
    ids=str,
)
def test_what_a_step_does_not_know_is_called(changes: dict[str, Any], made: list[int]) -> None:
    model, ids = model_of(**changes), tokens(1, 6)
    found, _ = logits_of(model, ids)
    assert made == []
    with torch.no_grad():
        whole = model(ids).logits[0, 2:]
    torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_convolution_of_somebodys_own_is_called(made: list[int]) -> None:
    class Other(ShortConvolution):
        def forward(self, *given: Any, **options: Any) -> Any:
            calls.append(1)
            return super().forward(*given, **options)

    (model, ids), calls = (model_of(), tokens(1, 6)), []
    model.model.layers[1].self_attn.convolution.__class__ = Other
    logits_of(model, ids)
    assert (len(calls), made) == (5, [])


@torch.no_grad()
def test_several_rows_and_other_types_are_called(made: list[int]) -> None:
    for model, batch in ((model_of(), 2), (model_of().double(), 1), (model_of().bfloat16(), 1)):
        logits_of(model, tokens(batch, 5))
    model = model_of()
    cache = model.new_cache(static=True)
    for ids in tokens(1, 4).split(1, 1):
        model(ids, past_key_values=cache, use_cache=True)
    assert made == []


def test_generate_goes_by_steps_to_the_same_tokens(
    made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = model_of(), tokens(1, 5)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    found = model.generate(prompt, **options)
    assert len(made) == 11
    monkeypatch.setattr(models_decoding, "plain_step_for", lambda *_: None)
    assert torch.equal(model.generate(prompt, **options), found)
    assert len(made) == 11


def test_an_interrupted_step_has_not_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    session = VortSession(model)
    session.feed(tokens(1, 5))
    expected = list(session.branch().generate(12, stop=()))
    going = session.generate(12, stop=())
    first = [next(going) for _ in range(4)]
    calls, block = [], plain_step._Block.__call__

    def interrupt(self: Any, *given: Any) -> Tensor:
        found = block(self, *given)  # the second block's buffers are written by then
        calls.append(self)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patch:
        patch.setattr(plain_step._Block, "__call__", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(going)
    assert session.tokens_seen == 9
    assert first + list(session.generate(8, stop=())) == expected


@torch.no_grad()
def test_a_cache_that_a_step_fails_with_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = model_of(), tokens(1, LENGTH)
    expected, _ = logits_of(model, ids)
    _, cache = logits_of(model, ids[:, :-2])
    with monkeypatch.context() as patch:
        patch.setattr(plain_step._Block, "_weigh", None)
        with pytest.raises(TypeError):
            model(ids[:, -1:], past_key_values=cache, use_cache=True)
    for t in (-2, -1):
        last = ids[:, t:] if t == -1 else ids[:, t:-1]
        found = model(last, past_key_values=cache, use_cache=True).logits[0, 0]
        assert torch.equal(found, expected[t])


@torch.no_grad()
def test_copies_keep_what_they_hold_while_the_original_goes_on() -> None:
    model, ids = model_of(), tokens(1, LENGTH)
    _, cache = logits_of(model, ids)
    kept = {
        "copy": cache.copy(),
        "deepcopy": deepcopy(cache),
        "aged": cache.aged(0, model),
        "selected": cache.select(torch.tensor([0])),
    }
    assert kept["deepcopy"].buffers is None  # nor the weights behind them
    loaded = cache.load_state(1)
    before = {i: {n: x.clone() for n, x in s.items()} for i, s in cache.states.items()}
    for _ in range(3):
        model(ids[:, :1], past_key_values=cache, use_cache=True)
    for name, copy in kept.items():
        for index, state in before.items():
            for part, x in state.items():
                torch.testing.assert_close(copy.states[index][part], x, msg=f"{name}: {part}")
    assert loaded is not None
    assert all(torch.equal(loaded[name], x) for name, x in before[1].items())


@torch.no_grad()
def test_changed_weights_and_whoever_watches_are_noticed_between_tokens() -> None:
    model, ids = model_of(), tokens(1, LENGTH)
    _, cache = logits_of(model, ids)
    calls = []
    hook = model.model.layers[1].mlp.register_forward_hook(lambda *_: calls.append(1))
    model(ids[:, :1], past_key_values=cache, use_cache=True)
    assert calls == [1]
    hook.remove()
    model(ids[:, :1], past_key_values=cache, use_cache=True)
    model.model.layers[0].mlp.up_proj.weight.mul_(2)
    found = model(ids[:, 1:2], past_key_values=(kept := cache.copy()), use_cache=True).logits
    other = VortForCausalLM(model.config).eval()
    other.load_state_dict(model.state_dict())
    again = other(ids[:, 1:2], past_key_values=cache, use_cache=True).logits
    assert torch.equal(found, again)
    assert kept.get_seq_length() == LENGTH + 3


def _optimized(model: VortForCausalLM) -> None:
    """A step of Trainer's optimizer, which on a CPU leaves every version as it was."""
    with torch.enable_grad():
        ids = tokens(1, LENGTH)
        model(ids, labels=ids).loss.backward()
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()


def _averaged(model: VortForCausalLM) -> None:
    for weight in model.parameters():
        weight.data.mul_(0.5)


def _given_others(model: VortForCausalLM) -> None:
    model.lm_head.weight.data = torch.ones_like(model.lm_head.weight)


def _replaced(model: VortForCausalLM) -> None:
    mlp = model.model.layers[1].mlp
    mlp.up_proj.weight = nn.Parameter(2 * mlp.up_proj.weight.detach())


def _with_another_part(model: VortForCausalLM) -> None:
    layer = model.model.layers[1]
    layer.mlp = deepcopy(layer.mlp)
    layer.mlp.up_proj.weight.data.mul_(2)


# What is noticed between two tokens of one memory; a new one looks at what weights hold.
AT_ONCE = [_optimized, _given_others, _replaced, _with_another_part]


@pytest.mark.parametrize(
    ("change", "within"),
    [*((change, True) for change in AT_ONCE), *((c, False) for c in (*AT_ONCE, _averaged))],
)
@torch.no_grad()
def test_weights_that_change_and_do_not_count_it_are_noticed(
    change: Callable[[VortForCausalLM], None], within: bool, made: list[int]
) -> None:
    model, ids = model_of(), tokens(1, LENGTH)
    _, cache = logits_of(model, ids)
    change(model)
    if not within:
        _, cache = logits_of(model, ids)
    other = VortForCausalLM(model.config).eval()
    other.load_state_dict(model.state_dict())
    kept, steps = cache.copy(), len(made)
    found = model(ids[:, :1], past_key_values=cache, use_cache=True).logits
    assert len(made) == steps + 1
    again = other(ids[:, :1], past_key_values=kept, use_cache=True).logits
    torch.testing.assert_close(found, again, atol=2e-5, rtol=2e-5)


@torch.no_grad()
def test_a_token_that_no_embedding_has_is_refused() -> None:
    model, ids = model_of(), tokens(1, LENGTH)
    _, cache = logits_of(model, ids)
    with pytest.raises(IndexError, match=r"token must lie in 0\.\..*, got -1"):
        model(torch.tensor([[-1]]), past_key_values=cache, use_cache=True)


@torch.no_grad()
def test_two_memories_of_a_model_take_turns() -> None:
    model, ids = model_of(), tokens(1, LENGTH)
    expected, _ = logits_of(model, ids)
    caches = [model.new_cache() for _ in range(2)]
    for t in range(LENGTH):
        for cache in caches:
            found = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits[0, 0]
    torch.testing.assert_close(found, expected[-1], atol=2e-5, rtol=2e-5)


def test_sessions_in_threads_do_not_meet() -> None:
    model = model_of()

    def written(seed: int) -> list[int]:
        session = VortSession(model, seed=seed)
        session.feed(tokens(1, 5))
        return list(session.generate(40, stop=()))

    alone = [written(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(written, range(4))) == alone
