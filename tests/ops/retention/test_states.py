"""The state is all that a sequence leaves behind."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.retention.cases import Case, cases, relative_error, small_pieces
from vort.ops.retention import (
    NORMALIZERS,
    RetentionState,
    empty_state,
    retention,
    retention_step,
)
from vort.ops.retention.chunk.layout import Plan
from vort.ops.retention.inputs import Inputs


def pieces(inputs: dict[str, Tensor], tokens: slice) -> dict[str, Tensor]:
    per_token = ("q", "k", "v", "write", "read")
    cut = {name: x[:, tokens] for name, x in inputs.items() if name in per_token}
    return {**cut, "log_decay": inputs["log_decay"]}


@pytest.mark.parametrize("backend", ["exact", "recurrent", "chunk"])
@settings(max_examples=25)
@given(case=cases(max_length=60), where=st.floats(0, 1))
def test_splitting_anywhere_changes_nothing(backend: str, case: Case, where: float) -> None:
    if case.lengths is not None:
        case = Case(**{**vars(case), "lengths": None})
    case = Case(**{**vars(case), "positive": True})
    inputs = {name: x.detach() for name, x in case.inputs(torch.float32).items()}
    whole = case.run(backend, inputs)
    cut = round(where * case.length)
    first = case.run(backend, {**inputs, **pieces(inputs, slice(0, cut))})
    state = {"G": first["final G"]}
    if "final b" in first:
        state["b"] = first["final b"]
    second = case.run(backend, {**pieces(inputs, slice(cut, None)), **state})
    joined = torch.cat([first["o"], second["o"]], 1)
    assert relative_error(joined, whole["o"]) < 1e-6
    assert relative_error(second["final G"], whole["final G"]) < 1e-6


def walk(steps: int, every: int) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of retention_step at every `every`-th token, and those of the chunk form."""
    torch.manual_seed(0)
    heads, keys, values = 1, 4, 4
    log_decay = -torch.tensor([0.0, 1e-6, 1e-4, 1e-2, 1.0, 50.0])
    num_scales = len(log_decay)
    state = empty_state(1, heads, num_scales, keys, values)
    memory: RetentionState | None = None
    stepped, chunked = [], []
    for _ in range(0, steps, every):
        q, k, v = (torch.rand(1, every, heads, size) for size in (keys, keys, values))
        write = torch.rand(1, every, heads, num_scales)
        state_in_out = {"initial_state": memory, "output_final_state": True}
        o, memory = retention(q, k, v, write, log_decay, backend="chunk", **state_in_out)
        for t in range(every):
            token = (x[:, t] for x in (q, k, v, write))
            o_t, state = retention_step(state, *token, log_decay, inplace=True)
        stepped.append(o_t)
        chunked.append(o[:, -1])
    assert memory is not None
    assert torch.isfinite(state.G).all()
    # A float32 sum of n equal terms is off by up to n / 2^24 however it is rounded.
    assert relative_error(state.G, memory.G) < 1e-3
    return stepped, chunked


@torch.no_grad()
def test_thousands_of_steps_stay_with_the_chunk_form() -> None:
    stepped, chunked = walk(5_000, 500)
    assert relative_error(torch.stack(stepped), torch.stack(chunked)) < 1e-4


@pytest.mark.parametrize("normalizer", ["decayed", "none"])
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("decay", [-0.5, -3.0, -10.0, -14.0, -17.0, -30.0])
def test_a_step_leaves_what_the_decay_says_however_fast(
    decay: float, include_self: bool, normalizer: str
) -> None:
    x, rate = torch.ones(1, 2, 1, 1), torch.tensor([decay])
    v, write = torch.tensor([3.0, 5.0]).view(1, 2, 1, 1), torch.tensor([1.0, 0.0]).view(1, 2, 1, 1)
    o, state = retention(
        x, x, v, write, rate, normalizer=normalizer, include_self=include_self,  # type: ignore[arg-type]
        output_final_state=True, backend="recurrent",
    )  # fmt: skip
    left = rate.double().exp().item()
    assert state is not None
    assert state.G.item() == pytest.approx(3 * left, rel=1e-6)
    wanted = 3.0 if normalizer == "decayed" else 3 * left
    assert o[0, 1].item() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("include_self", [True, False])
@torch.no_grad()
def test_a_compiled_step_moves_a_state_on_in_place_however_it_lies(include_self: bool) -> None:
    state = RetentionState(torch.rand(1, 2, 3, 5, 4).mT, torch.rand(1, 2, 3, 4))
    token = [torch.rand(1, 2, size) for size in (4, 4, 5, 3)]
    decay, before = -torch.tensor([0.01, 1.0, 9.0]), RetentionState(*(x.clone() for x in state))
    options = {"include_self": include_self}
    wanted, after = retention_step(before, *token, decay, **options)  # type: ignore[arg-type]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(state: RetentionState) -> Tensor:
        return retention_step(state, *token, decay, inplace=True, **options)[0]  # type: ignore[arg-type]

    torch.testing.assert_close(step(state), wanted)
    torch.testing.assert_close(tuple(state), tuple(after))


@pytest.mark.slow
@torch.no_grad()
def test_a_million_steps_stay_finite_and_with_the_chunk_form() -> None:
    stepped, chunked = walk(1_000_000, 10_000)
    assert relative_error(torch.stack(stepped), torch.stack(chunked)) < 1e-4


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("include_self", [True, False])
def test_step_in_place_equals_step(normalizer: str, include_self: bool) -> None:
    case = Case(length=1, normalizer=normalizer, include_self=include_self)
    inputs = {name: x.detach() for name, x in case.inputs(torch.float32).items()}
    token = [inputs[name][:, 0] for name in ("q", "k", "v", "write")]
    answers = []
    for inplace in (False, True):
        b = inputs["b"].clone() if "b" in inputs else None
        o, state = retention_step(
            RetentionState(inputs["G"].clone(), b),
            *token,
            inputs["log_decay"],
            read_t=inputs["read"][:, 0],
            normalizer=normalizer,
            include_self=include_self,
            inplace=inplace,
        )
        answers.append((o, state))
    (o, state), (o_in, state_in) = answers
    assert torch.equal(o, o_in)
    assert torch.equal(state.G, state_in.G)


def test_step_in_place_keeps_its_memory() -> None:
    state = empty_state(1, 2, 3, 4, 5)
    address = state.G.data_ptr()
    token = (torch.rand(1, 2, size) for size in (4, 4, 5, 3))
    _, state = retention_step(state, *token, -torch.ones(3), inplace=True)
    assert state.G.data_ptr() == address


@pytest.mark.parametrize("backend", ["exact", "recurrent", "chunk"])
def test_packed_sequences_equal_sequences_alone(backend: str) -> None:
    case = Case(lengths=(20, 0, 35, 1), batch=1)
    inputs = {name: x.detach() for name, x in case.inputs().items()}
    with small_pieces():
        packed = case.run(backend, inputs)
    start = 0
    for index, length in enumerate(case.lengths or ()):
        alone = Case(length=length)
        given = pieces(inputs, slice(start, start + length))
        given.update(G=inputs["G"][index : index + 1], b=inputs["b"][index : index + 1])
        found = alone.run(backend, given)
        torch.testing.assert_close(found["o"], packed["o"][:, start : start + length])
        torch.testing.assert_close(found["final G"], packed["final G"][index : index + 1])
        start += length


@pytest.mark.parametrize("backend", ["exact", "recurrent", "chunk"])
def test_nothing_leaks_between_packed_sequences_forward_or_backward(backend: str) -> None:
    case = Case(lengths=(20, 35), chunk_size=16)
    inputs = case.inputs()
    with small_pieces():
        before = case.run(backend, inputs)["o"]
        loss = before[:, 20:].square().sum()
        grads = dict(zip(inputs, torch.autograd.grad(loss, list(inputs.values())), strict=True))
        for name in ("q", "k", "v", "write", "read"):
            assert not grads[name][:, :20].any(), name
        assert not grads["G"][0].any()
        changed = {name: x.detach().clone() for name, x in inputs.items()}
        for name in ("q", "k", "v", "write", "read"):
            changed[name][:, :20] += 1
        after = case.run(backend, changed)["o"]
    assert torch.equal(before[:, 20:], after[:, 20:])


def test_many_short_sequences_get_short_chunks() -> None:
    q = torch.zeros(1, 1000, 4, 8)
    one = Inputs(q, q, q, q, torch.zeros(8))
    assert Plan.of(one._replace(cu_seqlens=torch.arange(0, 1001, 10))).chunk == 16
    assert Plan.of(one).chunk == 64


def test_final_state_is_none_unless_asked_for() -> None:
    x = torch.ones(1, 5, 1, 1)
    assert retention(x, x, x, x, torch.zeros(1))[1] is None


@pytest.mark.parametrize("backend", ["auto", "exact", "recurrent", "chunk"])
@pytest.mark.parametrize("packed", [False, True])
def test_no_tokens_hand_back_a_copy_of_the_state(backend: str, packed: bool) -> None:
    state = empty_state(1, 1, 2, 3, 3)
    x, write = torch.ones(1, 0, 1, 3), torch.ones(1, 0, 1, 2)
    _, after = retention(
        x, x, x, write, -torch.ones(2), initial_state=state, output_final_state=True,
        cu_seqlens=torch.tensor([0, 0]) if packed else None, backend=backend,
    )  # fmt: skip
    assert after is not None
    token = (torch.ones(1, 1, size) for size in (3, 3, 3, 2))
    retention_step(after, *token, -torch.ones(2), inplace=True)
    assert not state.G.any()
    assert state.b is not None
    assert not state.b.any()


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("read", [False, True])
def test_an_empty_batch_has_empty_gradients(normalizer: str, read: bool) -> None:
    case = Case(batch=0, length=100, normalizer=normalizer, read=read)
    _, gradients = case.run_with_gradients("chunk", case.inputs())
    for name, x in case.inputs().items():
        assert gradients[name].shape == x.shape
        assert not gradients[name].any()
