"""Memories whose token decides how much the state keeps: Mamba-2's and Gated DeltaNet's.

Their chunks against the recurrence of their docstrings, one step at a time in float64; and the
memories against the same, with steps, rates and gates computed from the parameters by hand.
"""

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.memories.cases import inputs, made
from vort.memories import MEMORIES, MemoryInputs
from vort.memories.gated_delta import gated_delta_chunk
from vort.memories.gla import gla_chunk
from vort.memories.mamba2 import scalar_gated_chunk
from vort.memories.recurrence import one_step

CHUNKED = {"mamba2": scalar_gated_chunk, "gated_delta": gated_delta_chunk}
NAMES = list(CHUNKED)


def recurrence(name: str, tensors: list[Tensor], scale: float = 1.0) -> Tensor:
    """Step by step: all decays, then a token is added, or replaces what its key finds."""
    q, k, v, log_gate, *strength = tensors
    G = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outputs = [v[:, :0]]
    for t in range(q.shape[1]):
        G = G * log_gate[:, t, :, None, None].exp()
        new = v[:, t]
        if name == "gated_delta":
            found = (k[:, t].unsqueeze(-2) @ G).squeeze(-2)
            new = strength[0][:, t, :, None] * (new - found)
        G = G + k[:, t].unsqueeze(-1) * new.unsqueeze(-2)
        outputs.append((scale * q[:, t].unsqueeze(-2) @ G).transpose(1, 2))
    return torch.cat(outputs, 1)


def problem(name: str, length: int, strength: float = 1.0) -> list[Tensor]:
    q, k = torch.nn.functional.normalize(torch.randn(2, 1, length, 2, 4).double(), dim=-1)
    v = torch.randn(1, length, 2, 6, dtype=torch.float64)
    gates = -strength * torch.rand(1, length, 2, dtype=torch.float64)
    beta = [torch.rand(1, length, 2, dtype=torch.float64)] if name == "gated_delta" else []
    return [q, k, v, gates, *beta]


@pytest.mark.parametrize("name", NAMES)
def test_single_steps_are_the_recurrence(name: str) -> None:
    tensors = problem(name, 6)
    state, outputs = None, []
    for t in range(6):
        output, state = one_step(*(x[:, t : t + 1] for x in tensors), scale=0.5, state=state)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, 1), recurrence(name, tensors, 0.5))
    torch.testing.assert_close(state, CHUNKED[name](*tensors, output_final_state=True)[1])


@pytest.mark.parametrize("name", NAMES)
@given(length=st.integers(0, 150), strength=st.sampled_from([0.0, 0.1, 3.0, 50.0]))
@settings(max_examples=15)
def test_chunks_equal_the_recurrence(name: str, length: int, strength: float) -> None:
    tensors = problem(name, length, strength)
    output, _ = CHUNKED[name](*tensors, scale=0.5)
    torch.testing.assert_close(output, recurrence(name, tensors, 0.5))


@pytest.mark.parametrize("name", NAMES)
@given(split=st.integers(0, 90))
@settings(max_examples=10)
def test_a_state_goes_on_where_it_stopped(name: str, split: int) -> None:
    tensors = problem(name, 90)
    first, state = CHUNKED[name](*(x[:, :split] for x in tensors), output_final_state=True)
    second, _ = CHUNKED[name](*(x[:, split:] for x in tensors), initial_state=state)
    torch.testing.assert_close(torch.cat([first, second], 1), recurrence(name, tensors))


@pytest.mark.parametrize("name", NAMES)
def test_packed_sequences_do_not_meet(name: str) -> None:
    tensors = problem(name, 70)
    bounds = torch.tensor([0, 30, 30, 70])
    output, states = CHUNKED[name](*tensors, cu_seqlens=bounds, output_final_state=True)
    parts = [recurrence(name, [x[:, a:b] for x in tensors]) for a, b in ((0, 30), (30, 70))]
    torch.testing.assert_close(output, torch.cat(parts, 1))
    assert states.shape == (3, 2, 4, 6)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_those_of_the_recurrence(name: str) -> None:
    tensors = [x.requires_grad_() for x in problem(name, 70, 2.0)]
    weights = torch.randn(1, 70, 2, 6, dtype=torch.float64)
    chunked = torch.autograd.grad((CHUNKED[name](*tensors)[0] * weights).sum(), tensors)
    wanted = torch.autograd.grad((recurrence(name, tensors) * weights).sum(), tensors)
    for got, expected in zip(chunked, wanted, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", NAMES)
def test_gates_that_forget_at_once_stay_finite(name: str) -> None:
    tensors = [x.float().requires_grad_() for x in problem(name, 100, 1e4)]
    output, state = CHUNKED[name](*tensors, output_final_state=True)
    gradients = torch.autograd.grad(output.sum() + state.sum(), tensors)
    assert all(x.isfinite().all() for x in (output, state, *gradients))


def stirred(name: str) -> Any:
    """A memory in float64 whose parameters all differ from their start, so that each one shows."""
    memory = made(name).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for x in memory.parameters():
            x.add_(0.7 * torch.randn(x.shape, generator=generator, dtype=torch.float64))
    return memory


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_memory_is_its_definition(name: str) -> None:
    memory, given = stirred(name), inputs()
    x, *heads = (y.double() for y in (given.hidden_states, given.q, given.k, given.v))
    q, k, v = heads
    decay = memory.gate_decay
    step = (1 + (x @ decay.step.weight.T + decay.step_bias).exp()).log()
    log_gate = -decay.log_rate.exp() * step
    if name == "mamba2":
        tensors = [q, k * step[..., None], v, log_gate]
    else:
        beta = 1 / (1 + (-x @ memory.gate_write.weight.T).exp())
        q, k = (y / y.square().sum(-1, keepdim=True).sqrt() for y in (q, k))
        tensors = [q, k, v, log_gate, beta]
    expected = recurrence(name, tensors, 8**-0.5)
    torch.testing.assert_close(memory(MemoryInputs(x, *heads)).output, expected)


@torch.no_grad()
def test_heads_begin_spread_over_what_mamba_draws_from() -> None:
    for heads, wanted in ((3, [0.625, 25.0, 1000.0]), (1, [25.0])):
        memory = MEMORIES["mamba2"](hidden_size=6, num_attention_heads=heads)
        step, log_decay = memory.gate_decay(torch.zeros(1, 1, 6))
        assert (-1 / log_decay).flatten().tolist() == pytest.approx(wanted, rel=1e-4)
        assert step.max().item() == pytest.approx(0.1 if heads > 1 else 0.01, rel=1e-4)


@torch.no_grad()
def test_a_model_starts_there_too() -> None:
    from vort.models import VortConfig, VortForCausalLM

    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = VortForCausalLM(VortConfig(**sizes, memory="gated_delta"))
    decay = model.model.memories[0].gate_decay
    assert (-1 / decay(torch.zeros(1, 1, 32))[1]).flatten().tolist() == pytest.approx([0.625, 1e3])


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["rows", "packed"])
def test_the_kernels_on_a_gpu_are_the_same(name: str, kind: str) -> None:
    pytest.importorskip("fla", reason="flash-linear-attention is not installed")
    torch.manual_seed(0)
    memory = MEMORIES[name](hidden_size=64, num_attention_heads=2, head_dim=64)
    q, k, v = torch.randn(3, 1, 200, 2, 64)
    tensors = [torch.randn(1, 200, 64), q, k, v]
    found: dict[str, list[Tensor]] = {}
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        bounds = None if kind == "rows" else torch.tensor([0, 70, 200], device=device)
        leaves = [x.detach().to(device).requires_grad_() for x in tensors]
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            heads = [x.to(dtype) for x in leaves[1:]]
            given = MemoryInputs(leaves[0], *heads, cu_seqlens=bounds)
            output = memory.to(device)(given).output.float()
        found[device] = [output, *torch.autograd.grad(output.square().sum(), leaves)]
    for ours, theirs in zip(found["cpu"], found["cuda"], strict=True):
        scale = ours.abs().max().item()
        torch.testing.assert_close(theirs.float().cpu(), ours, atol=4e-2 * scale, rtol=4e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_steps_on_a_gpu_go_on_from_the_state_of_the_chunks(name: str) -> None:
    pytest.importorskip("fla", reason="flash-linear-attention is not installed")
    torch.manual_seed(0)
    memory = MEMORIES[name](hidden_size=64, num_attention_heads=2, head_dim=64).cuda()
    q, k, v = torch.randn(3, 2, 100, 2, 64, device="cuda", dtype=torch.bfloat16)
    given = MemoryInputs(torch.randn(2, 100, 64, device="cuda"), q, k, v)
    whole = memory(given).output.float()
    first = [x[:, :90] for x in (given.hidden_states, q, k, v)]
    state, outputs = memory(MemoryInputs(*first), output_state=True).state, []
    for position in range(90, 100):
        found = memory.step(given.at(position), state)
        outputs.append(found.output.float())
        state = found.state
    scale = whole.abs().max().item()
    torch.testing.assert_close(torch.cat(outputs, 1), whole[:, 90:], atol=3e-2 * scale, rtol=3e-2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("version", "capability", "theirs"),
    [
        ("3.6.0", (9, 0), False),
        ("3.4.0+git1", (9, 0), False),
        ("3.7.1", (9, 0), True),
        ("3.6.0", (8, 0), True),
    ],
)
def test_kernels_that_would_refuse_to_train_are_not_taken(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    version: str,
    capability: tuple[int, int],
    theirs: bool,
) -> None:
    module = importlib.import_module(f"vort.memories.{name}")
    chunked = SimpleNamespace(chunk_simple_gla="theirs", chunk_gated_delta_rule="theirs")
    monkeypatch.setattr(module, "fla_kernels", lambda q, of: chunked)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert (module._kernel(torch.zeros(1, 8, 2, 4)) == "theirs") is theirs


def test_gated_delta_can_be_differentiated_twice_where_heads_are_zeros() -> None:
    memory, tokens = made("gated_delta").double(), inputs(5)
    hidden, q, k, v = (x[:1].double() for x in (tokens.hidden_states, tokens.q, tokens.k, tokens.v))
    real = torch.arange(5)[:, None, None] < 3
    q, k, v = ((x * real).requires_grad_() for x in (q, k, v))

    def loss() -> Tensor:
        return (memory(MemoryInputs(hidden, q, k, v)).output * real).square().sum()

    first = torch.autograd.grad(loss(), (q, k, v), create_graph=True)
    second = torch.autograd.grad(sum(x[:, :3].square().sum() for x in first), (q, k, v))
    assert all(x.isfinite().all() for x in second)


BAD = {
    "bounds that end early": ({"cu_seqlens": [0, 10]}, "cu_seqlens must end at T = 20, got 10"),
    "bounds that start late": ({"cu_seqlens": [2, 20]}, "cu_seqlens must start at 0, got 2"),
    "bounds that fall": (
        {"cu_seqlens": [0, 15, 5, 20]},
        "cu_seqlens must not decrease, got 15 then 5 at index 2",
    ),
    "packed rows": (
        {"rows": 2, "cu_seqlens": [0, 20]},
        "cu_seqlens needs packed sequences with batch size 1, got 2",
    ),
    "a state for one of two rows": (
        {"rows": 2, "states": 1},
        r"initial_state must be \[2, 2, 4, 6\] \(N, H, D, V\) to go with q and v, got \[1, 2,",
    ),
    "a state for one of two sequences": (
        {"cu_seqlens": [0, 5, 20], "states": 1},
        r"initial_state must be \[2, 2, 4, 6\] .*, got \[1, 2, 4, 6\]",
    ),
    "values of fewer steps": (
        {"values": 17},
        r"q, k, v and gates must have the same \[B, T, H\], got \[1, 20, 2\], .* \[1, 17, 2\]",
    ),
}


@pytest.mark.parametrize("op", [*CHUNKED.values(), gla_chunk])
@pytest.mark.parametrize("case", BAD)
def test_what_does_not_go_together_is_refused(op: Any, case: str) -> None:
    given, message = BAD[case]
    tensors = problem("gated_delta" if op is gated_delta_chunk else "mamba2", 20)
    if op is gla_chunk:
        tensors[3] = tensors[3].unsqueeze(-1).expand(-1, -1, -1, 4)
    tensors = [x.expand(given.get("rows", 1), *x.shape[1:]) for x in tensors]
    tensors[2] = tensors[2][:, : given.get("values", 20)]
    bounds = torch.tensor(given["cu_seqlens"]) if "cu_seqlens" in given else None
    state = torch.zeros(given["states"], 2, 4, 6) if "states" in given else None
    with pytest.raises(ValueError, match=message):
        op(*tensors, initial_state=state, cu_seqlens=bounds)


def test_a_step_refuses_a_state_of_other_rows() -> None:
    tensors = [x.expand(2, *x.shape[1:]) for x in problem("mamba2", 1)]
    with pytest.raises(ValueError, match=r"state must be \[2, 2, 4, 6\] .*, got \[1, 2, 4, 6\]"):
        one_step(*tensors, scale=1.0, state=torch.zeros(1, 2, 4, 6))
