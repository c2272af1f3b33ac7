"""VORT's memory with the options of its router, against its sums written out in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.memories.cases import inputs, made
from vort.memories import MemoryInputs, VortMemory

OPTIONS: list[dict[str, Any]] = [
    {},
    {"learn_basis": True},
    {"order_input": "values"},
    {"learn_basis": True, "order_input": "values", "include_self": False},
    {"order_start": [0.3, 0.8], "learn_basis": True, "num_key_value_heads": 1},
    {"write_gain": "token"},
    {"write_gain": "scale", "order_input": "values"},
]


def memory_of(**options: Any) -> VortMemory:
    memory: Any = made("vort", num_scales=6, use_entropy=False, **options).double()
    torch.manual_seed(1)
    if memory.router.log_factor is not None:
        torch.nn.init.normal_(memory.router.log_factor, std=0.5)
    torch.nn.init.normal_(memory.router.order.weight, std=0.5)
    if memory.router.gate_gain is not None:
        torch.nn.init.normal_(memory.router.gate_gain.weight, std=0.5)
    return memory  # type: ignore[no-any-return]


def given_for(memory: VortMemory, length: int = 12) -> MemoryInputs:
    found = inputs(length=length, kv_heads=memory.num_key_value_heads)
    names = ("hidden_states", "q", "k", "v")
    wide = {n: getattr(found, n).double().requires_grad_() for n in names}
    return replace(found, **wide, entropy=None)


def written_out(memory: VortMemory, given: MemoryInputs) -> Tensor:
    """Σ_i φ(q_t)·φ(k_i) Σ_s read_ts e^{-f_s rate_s (t-i)} w_s(order_i) gate_i gain_is v_i.

    Normalised.
    """
    router, x = memory.router, given.hidden_states
    source = given.v.flatten(2) if memory.settings.order_input == "values" else x
    logits = source @ router.order.weight.T + router.order.bias
    low = router.order_min
    order = low + (1 - low) * torch.sigmoid(logits)
    gate, read = router.gates(x)
    write = router.basis.weights(order, validate=False) * gate.unsqueeze(-1)
    if router.gate_gain is not None:
        logits = x @ router.gate_gain.weight.T + router.gate_gain.bias
        write = write * logits.unflatten(-1, (memory.num_heads, -1)).exp()
    rates = torch.tensor(router.basis.rates).to(torch.float32).double()
    factor = 1 if router.log_factor is None else router.log_factor.exp()
    rates = (rates * factor).expand(memory.num_heads, memory.num_scales)
    every = given.with_all_heads()
    q, k = memory.query_map.map_query(every.q), memory.key_map(every.k)
    rows = []
    for t in range(x.shape[1]):
        top = torch.zeros_like(every.v[:, 0])
        bottom = torch.zeros_like(top[..., :1])
        for i in range(t + 1 if memory.include_self else t):
            kernel = (read[:, t] * torch.exp(-rates * (t - i)) * write[:, i]).sum(-1, keepdim=True)
            weight = (q[:, t] * k[:, i]).sum(-1, keepdim=True) * kernel
            top, bottom = top + weight * every.v[:, i], bottom + weight
        rows.append(top / (bottom.abs() + memory.eps))
    return torch.stack(rows, 1)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_outputs_and_gradients_are_those_of_the_sums_written_out(options: dict[str, Any]) -> None:
    memory = memory_of(**options)
    given = given_for(memory)
    wanted = [x for x in memory.parameters() if x.requires_grad]
    wanted += [given.hidden_states, given.q, given.k, given.v]
    torch.manual_seed(2)
    direction = torch.randn_like(given.q)
    outputs = [memory(given).output, written_out(memory, given)]
    torch.testing.assert_close(*outputs, atol=1e-9, rtol=1e-7)
    found, expected = (
        torch.autograd.grad((output * direction).sum(), wanted, allow_unused=True)
        for output in outputs
    )
    for ours, exact in zip(found, expected, strict=True):
        assert (ours is None) == (exact is None)
        if ours is not None:
            torch.testing.assert_close(ours, exact, atol=1e-8, rtol=1e-6)
    if options.get("learn_basis"):
        # The slowest rate of a basis is 0, of which nothing is learned.
        grad = found[[x is memory.router.log_factor for x in wanted].index(True)]
        assert (grad[:, 1:] != 0).all()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@torch.no_grad()
def test_a_state_in_between_changes_nothing(options: dict[str, Any]) -> None:
    memory = memory_of(**options)
    given = given_for(memory)
    whole, state, parts = memory(given, output_state=True), None, []
    for position in range(given.q.shape[1]):
        found = memory.step(given.at(position), state)
        parts.append(found.output)
        state = found.state
    torch.testing.assert_close(torch.cat(parts, 1), whole.output, atol=1e-9, rtol=1e-7)
    for name, x in whole.state.items():
        torch.testing.assert_close(state[name], x)
