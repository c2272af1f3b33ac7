from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vort.memories.gla import _sequence, gla_chunk, gla_exact
from vort.memories.recurrence import each_sequence, one_step


def problem(length: int, strength: float, batch: int = 1) -> list[torch.Tensor]:
    shape = (batch, length, 2, 4)
    q, k, v = torch.randn(3, *shape, dtype=torch.float64)
    return [q, k, v, -strength * torch.rand(shape, dtype=torch.float64)]


@given(length=st.integers(1, 150), strength=st.sampled_from([0.0, 0.1, 3.0, 50.0]))
@settings(max_examples=20)
def test_chunks_equal_the_definition(length: int, strength: float) -> None:
    tensors = problem(length, strength)
    output, _ = gla_chunk(*tensors, scale=0.5)
    torch.testing.assert_close(output, gla_exact(*tensors, scale=0.5))


@given(split=st.integers(0, 90))
@settings(max_examples=10)
def test_a_state_goes_on_where_it_stopped(split: int) -> None:
    tensors = problem(90, 1.0)
    first, state = gla_chunk(*(x[:, :split] for x in tensors), output_final_state=True)
    rest = [x[:, split:] for x in tensors]
    second, _ = gla_chunk(*rest, initial_state=state)
    torch.testing.assert_close(torch.cat([first, second], 1), gla_exact(*tensors))


def test_single_steps_equal_the_definition() -> None:
    tensors = [x.requires_grad_() for x in problem(5, 1.0, batch=2)]
    state, outputs = None, []
    for t in range(5):
        output, state = one_step(*(x[:, t : t + 1] for x in tensors), scale=0.5, state=state)
        outputs.append(output)
    found, wanted = torch.cat(outputs, 1), gla_exact(*tensors, scale=0.5)
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad(x.square().sum(), tensors) for x in (found, wanted)]
    for got, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(got, exact)


def test_packed_sequences_do_not_meet() -> None:
    tensors = problem(70, 1.0)
    bounds = torch.tensor([0, 30, 30, 70])
    output, states = gla_chunk(*tensors, cu_seqlens=bounds, output_final_state=True)
    parts = [gla_exact(*(x[:, a:b] for x in tensors)) for a, b in ((0, 30), (30, 70))]
    torch.testing.assert_close(output, torch.cat(parts, 1))
    assert states.shape[0] == 3


def test_gradients_equal_those_of_the_definition() -> None:
    tensors = [x.requires_grad_() for x in problem(70, 2.0)]
    weights = torch.randn(1, 70, 2, 4, dtype=torch.float64)
    chunked = torch.autograd.grad((gla_chunk(*tensors)[0] * weights).sum(), tensors)
    exact = torch.autograd.grad((gla_exact(*tensors) * weights).sum(), tensors)
    for got, wanted in zip(chunked, exact, strict=True):
        torch.testing.assert_close(got, wanted)


def test_gates_that_forget_at_once_stay_finite() -> None:
    q, k, v, log_gate = (x.float() for x in problem(100, 1e4))
    output, state = gla_chunk(q, k, v, log_gate, output_final_state=True)
    assert output.isfinite().all()
    assert state.isfinite().all()


@pytest.mark.gpu
def test_flash_linear_attention_agrees() -> None:
    pytest.importorskip("fla", reason="flash-linear-attention is not installed")
    from fla.ops.gla import chunk_gla

    tensors = [x.float().cuda() for x in problem(130, 1.0)]
    theirs, _ = chunk_gla(*tensors, scale=1.0)
    torch.testing.assert_close(gla_chunk(*tensors)[0], theirs.float(), atol=1e-2, rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("normalizer", ["none", "decayed"])
def test_gla_at_the_state_of_vort_is_the_same_on_a_gpu(normalizer: str) -> None:
    pytest.importorskip("fla", reason="flash-linear-attention is not installed")
    from vort.memories import GatedScalesMemory, MemoryInputs

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 64, "num_scales": 12}
    memory = GatedScalesMemory(**sizes, horizon=10_000, normalizer=normalizer)
    q, k, v = torch.randn(3, 2, 200, 2, 64)
    given = [torch.randn(2, 200, 64), q, k, v]
    found = {}
    for device in ("cpu", "cuda"):
        leaves = [x.detach().to(device).requires_grad_() for x in given]
        output = memory.to(device)(MemoryInputs(*leaves)).output
        found[device] = [output, *torch.autograd.grad(output.square().sum(), leaves)]
    for ours, theirs in zip(found["cpu"], found["cuda"], strict=True):
        scale = ours.abs().max().item()
        torch.testing.assert_close(theirs.cpu(), ours, atol=2e-2 * scale, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalizer", ["none", "decayed"])
def test_places_asked_for_on_a_gpu_read_what_all_positions_do(
    normalizer: str, dtype: torch.dtype
) -> None:
    from vort.memories import GatedScalesMemory, MemoryInputs
    from vort.ops.asked import Asked, pick

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 64, "num_scales": 12}
    memory = GatedScalesMemory(**sizes, horizon=10_000, normalizer=normalizer)
    q, k, v = torch.randn(3, 2, 200, 2, 64).to(dtype)
    given = [torch.randn(2, 200, 64), q, k, v]
    places, found = torch.tensor([399, 3, 4, 250, 199]), {}
    for device in ("cpu", "cuda"):
        leaves = [x.detach().to(device).requires_grad_() for x in given]
        asked = Asked(places.to(device), 2, 200)
        with torch.autocast(
            device, torch.bfloat16, enabled=dtype is not torch.float32 and device == "cuda"
        ):
            wide = leaves if device == "cuda" else [x.float() for x in leaves]
            output = memory.to(device)(MemoryInputs(*wide, asked=asked)).output
        assert output.ndim == (3 if device == "cuda" else 4)
        output = (output if device == "cuda" else pick(output, asked)).float()
        found[device] = [output, *torch.autograd.grad(output.square().sum(), leaves)]
    for ours, theirs in zip(found["cpu"], found["cuda"], strict=True):
        scale = ours.abs().max().item()
        torch.testing.assert_close(theirs.cpu(), ours, atol=3e-2 * scale, rtol=3e-2)


def test_hundreds_of_packed_sequences_are_computed_side_by_side() -> None:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 150, (120,), generator=draw).tolist()
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    shape = (1, int(bounds[-1]), 2, 8)
    q, k, v = (torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(3))
    gate = -torch.rand(shape, generator=draw, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v, gate)]
    before = torch.randn(120, 2, 8, 8, generator=draw, dtype=torch.float64)
    options = {"output_final_state": True}
    calls = []

    def counted(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(given[0].shape[0])
        return _sequence(*given)

    output, states = each_sequence(counted, tuple(leaves), 1.0, before, True, bounds)
    # Four lengths within a chunk, and those of two and three.
    assert len(calls) <= 6
    assert sum(calls) == sum(length > 0 for length in lengths)
    assert states is not None
    found = torch.autograd.grad(output.square().sum(), leaves)
    alone = [
        gla_chunk(*(x[:, a:b] for x in leaves), initial_state=before[n : n + 1], **options)
        for n, (a, b) in enumerate(pairwise(bounds.tolist()))
    ]
    torch.testing.assert_close(output, torch.cat([o for o, _ in alone], 1))
    torch.testing.assert_close(states, torch.cat([state for _, state in alone]))
    expected = torch.autograd.grad(sum(o.square().sum() for o, _ in alone), leaves)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("length", [17, 64, 130])
def test_gates_that_forget_nothing_have_gradients_too(length: int) -> None:
    tensors = problem(length, 1.0)
    # Sums of gates stand still where most are 0, and rounding must not seem to bring them back.
    tensors[3] = tensors[3] * (torch.rand(length, 1, 1) < 0.3)
    leaves = [x.requires_grad_() for x in tensors]
    found, exact = (
        torch.autograd.grad(op(*leaves).square().sum(), leaves)
        for op in (lambda *x: gla_chunk(*x)[0], gla_exact)
    )
    for got, wanted in zip(found, exact, strict=True):
        torch.testing.assert_close(got, wanted)
