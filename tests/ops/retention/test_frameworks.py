"""The op inside what people wrap around it: compile, autocast, checkpointing, logging."""

import logging

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from tests.ops.retention.cases import Case
from vort.ops.retention import (
    RetentionState,
    empty_state,
    exact_retention_with_kernel,
    explain_backend,
    retention,
    retention_step,
)

CASE = Case(length=70, keys=8, values=8, positive=True)


def call(inputs: dict[str, torch.Tensor], backend: str = "chunk") -> torch.Tensor:
    given = dict(inputs)
    state = RetentionState(given.pop("G"), given.pop("b"))
    return retention(**given, initial_state=state, backend=backend)[0]


def test_compile_has_no_graph_break_and_the_same_gradients() -> None:
    inputs = CASE.inputs(torch.float32)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected, found = call(inputs), compiled(inputs)
    torch.testing.assert_close(found, expected)
    leaves = list(inputs.values())
    for ours, theirs in zip(
        torch.autograd.grad(found.square().sum(), leaves),
        torch.autograd.grad(expected.square().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_compile_of_packed_sequences_has_no_graph_break() -> None:
    case = Case(lengths=(10, 0, 30), state=False)
    inputs = case.inputs(torch.float32)

    def packed(inputs: dict[str, torch.Tensor], cu_seqlens: torch.Tensor) -> torch.Tensor:
        return retention(**inputs, cu_seqlens=cu_seqlens, backend="chunk")[0]

    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    found, expected = (f(inputs, case.cu_seqlens) for f in (compiled, packed))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([0, 30], "end at T = 70, got 30"),
        ([5, 70], "start at 0, got 5"),
        ([0, 50, 20, 70], "not decrease, got 50 then 20 at index 2"),
        ([0, 90], "end at T = 70, got 90"),
    ],
)
def test_a_compiled_call_refuses_bad_bounds_too(bounds: list[int], message: str) -> None:
    def packed(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        return retention(x, x, x, x, -torch.ones(4), cu_seqlens=cu_seqlens)[0]

    compiled = torch.compile(packed, backend="aot_eager")
    with pytest.raises(ValueError, match=f"cu_seqlens must {message}"):
        compiled(torch.rand(1, 70, 2, 4), torch.tensor(bounds))


def test_compile_makes_one_graph_for_many_lengths() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda x: retention(x, x, x, x, -torch.ones(4)), fullgraph=True, backend=counter
    )
    for length in (70, 90, 130, 170, 210):
        x = torch.rand(1, length, 2, 4)
        torch._dynamo.mark_dynamic(x, 1)
        torch.testing.assert_close(compiled(x), retention(x, x, x, x, -torch.ones(4)))
    assert counter.frame_count == 1


def test_the_operators_pass_torchs_own_checks() -> None:
    case = Case(length=20, num_scales=3)
    inputs = case.inputs(torch.float32)
    arguments = [inputs[name] for name in ("q", "k", "v", "write", "log_decay", "read", "G", "b")]
    torch.library.opcheck(
        torch.ops.vort.retention_chunk.default,
        (*arguments, None, None, "decayed", True, 1e-6, True, 16, True),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.parametrize("backend", ["exact", "recurrent", "chunk"])
def test_autocast_does_not_lower_the_sums(backend: str) -> None:
    inputs = CASE.inputs(torch.float32)
    expected = call(inputs, backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = call(inputs, backend)
        found.sum().backward()
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    assert all(torch.isfinite(x.grad).all() for x in inputs.values() if x.grad is not None)


def test_autocast_does_not_lower_the_sums_of_a_step_or_of_another_kernel() -> None:
    state = empty_state(1, 2, 3, 8, 8)
    q, k, v, write = (torch.rand(1, 2, size) for size in (8, 8, 8, 3))
    x, order = torch.rand(1, 20, 2, 8), torch.rand(1, 20, 2) + 1

    def results() -> list[torch.Tensor]:
        stepped, after = retention_step(state, q, k, v, write, -torch.ones(3))
        found = exact_retention_with_kernel(x, x, x, order, lambda order, lag: order**-lag)
        return [stepped, after.G, found]

    expected = results()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(results(), expected, strict=True))


def test_shapes_alone_are_found_on_the_meta_device() -> None:
    state = empty_state(1, 2, 3, 4, 5, device="meta")
    token = (torch.empty(1, 2, size, device="meta") for size in (4, 4, 5, 3))
    assert retention_step(state, *token, torch.empty(3, device="meta"))[0].shape == (1, 2, 5)
    x = torch.empty(1, 6, 2, 4, device="meta")
    kernel = exact_retention_with_kernel(x, x, x, x[..., 0], lambda order, lag: order**-lag)
    assert kernel.shape == x.shape


@pytest.mark.parametrize("backend", ["auto", "chunk", "exact", "recurrent"])
def test_many_decays_at_once_by_vmap(backend: str) -> None:
    x, write, rates = torch.rand(1, 20, 2, 4), torch.rand(1, 20, 2, 3), -torch.rand(5, 3)

    def found(rate: torch.Tensor) -> torch.Tensor:
        return retention(x, x, x, write, rate, backend=backend)[0]

    expected = torch.stack([found(rate) for rate in rates])
    torch.testing.assert_close(torch.vmap(found)(rates), expected)


@pytest.mark.parametrize("include_self", [True, False])
def test_many_states_at_once_by_vmap(include_self: bool) -> None:
    G, b = torch.rand(5, 1, 2, 3, 4, 4), torch.rand(5, 1, 2, 3, 4)
    x, write = torch.rand(1, 2, 4), torch.rand(1, 2, 3)

    def found(G: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, RetentionState]:
        given = (x, x, x, write, -torch.ones(3))
        return retention_step(RetentionState(G, b), *given, include_self=include_self)

    outputs, states = torch.vmap(found)(G, b)
    for i in range(len(G)):
        output, state = found(G[i], b[i])
        torch.testing.assert_close(outputs[i], output)
        torch.testing.assert_close(states.G[i], state.G)


@pytest.mark.parametrize("backend", ["recurrent", "chunk"])
def test_mixed_dtypes_as_autocast_makes_them(backend: str) -> None:
    inputs = CASE.inputs(torch.float32)
    mixed = {
        name: x.detach().to(torch.bfloat16 if name in ("q", "k", "v") else x.dtype).requires_grad_()
        for name, x in inputs.items()
    }
    o = call(mixed, backend)
    o.float().sum().backward()
    assert o.dtype == torch.bfloat16
    for name, x in mixed.items():
        assert x.grad is not None, name
        assert x.grad.dtype == x.dtype, name


def test_checkpointing_gives_the_same_gradients() -> None:
    inputs = CASE.inputs(torch.float32)
    leaves = list(inputs.values())
    plain = torch.autograd.grad(call(inputs).square().sum(), leaves)
    again = checkpoint(call, inputs, use_reentrant=False)
    for ours, theirs in zip(torch.autograd.grad(again.square().sum(), leaves), plain, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("backend", ["chunk", "recurrent"])
def test_a_second_derivative_is_that_of_the_definition(backend: str) -> None:
    inputs = CASE.inputs()
    leaves = list(inputs.values())

    def second(backend: str) -> tuple[torch.Tensor, ...]:
        # A plain sum sends back a constant gradient, which hides what is missing.
        loss = call(inputs, backend).sum()
        (gradient,) = torch.autograd.grad(loss, inputs["q"], create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), leaves, allow_unused=True)

    for ours, theirs in zip(second(backend), second("exact"), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_tensors_need_not_be_contiguous() -> None:
    inputs = {name: x.detach() for name, x in CASE.inputs().items()}
    strided = {
        name: x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x
        for name, x in inputs.items()
    }
    torch.testing.assert_close(call(strided), call(inputs))


def test_auto_says_what_it_picked(caplog: pytest.LogCaptureFixture) -> None:
    assert explain_backend(torch.zeros(1, 100, 2, 4)) == "chunk: no GPU, 100 tokens"
    assert explain_backend(torch.zeros(1, 1, 2, 4)).startswith("recurrent: 1 tokens")
    assert explain_backend(torch.zeros(1, 1, 2, 4), backend="exact") == "exact: asked for"
    short, long = torch.ones(1, 3, 1, 1), torch.ones(1, 30, 1, 1)
    with caplog.at_level(logging.DEBUG, logger="vort.ops.retention"):
        retention(long, long, long, long, torch.zeros(1))
        assert "chunk (no GPU, 30 tokens)" in caplog.text
        retention(short, short, short, short, torch.zeros(1))
        assert "recurrent (3 tokens, as in decoding)" in caplog.text
        caplog.clear()
        retention(short, short, short, short, torch.zeros(1), chunk_size=16)
        assert "chunk (no GPU, 3 tokens)" in caplog.text


@pytest.mark.gpu
@pytest.mark.slow
def test_one_token_without_gradients_takes_the_fused_step() -> None:
    q = torch.zeros(1, 1, 2, 16, device="cuda")
    assert explain_backend(q) == "triton: one token on a GPU with Triton"
    assert explain_backend(q.requires_grad_()).startswith("recurrent")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_triton_without_a_gpu_says_so() -> None:
    x = torch.ones(1, 30, 1, 1)
    with pytest.raises(RuntimeError, match="backend 'triton' needs"):
        retention(x, x, x, x, torch.zeros(1), backend="triton")
