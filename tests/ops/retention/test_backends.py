"""Every backend computes the definition: outputs, final states and all gradients."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.ops.retention.cases import (
    DECAYS,
    Case,
    assert_agrees,
    cases,
    relative_error,
    small_pieces,
)
from vort.ops.retention import NORMALIZERS, retention

FAST = ["recurrent", "chunk"]


@pytest.mark.parametrize("backend", FAST)
@settings(max_examples=60)
@given(case=cases(), pieces=st.sampled_from([1, 2000, 1 << 20]))
@example(case=Case(length=0), pieces=1)
@example(case=Case(length=1, keys=1, values=1, num_scales=1), pieces=1)
@example(case=Case(lengths=(0, 0, 0)), pieces=1)
@example(case=Case(lengths=(0, 17, 0, 0, 33, 1), normalizer="undecayed"), pieces=1)
@example(case=Case(decays=(200.0,), length=50), pieces=1)
@example(case=Case(decays=(0.0,), length=50), pieces=1)
def test_backend_equals_exact_in_float64(backend: str, case: Case, pieces: int) -> None:
    with small_pieces(pieces):
        assert_agrees(case, backend)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("lengths", [None, (0, 30, 1, 0, 16, 40)])
def test_chunk_equals_exact_for_every_mode(
    normalizer: str, include_self: bool, read: bool, lengths: tuple[int, ...] | None
) -> None:
    for state in (True, False):
        case = Case(
            length=83,
            normalizer=normalizer,
            include_self=include_self,
            read=read,
            state=state,
            lengths=lengths,
        )
        with small_pieces():
            assert_agrees(case, "chunk")


# The normaliser is kept away from 0, where any precision is lost, by positive features.
LOW_PRECISION = [
    Case(
        length=150, keys=16, values=8, num_scales=8, normalizer=normalizer, positive=True, eps=1e-6
    )
    for normalizer in NORMALIZERS
] + [
    Case(
        length=130, keys=16, values=8, num_scales=24, read=False, positive=True, decays=DECAYS[:5]
    ),
    Case(
        lengths=(0, 40, 1, 90), keys=8, values=16, num_scales=3, positive=True, include_self=False
    ),
]


@pytest.mark.parametrize("backend", ["exact", *FAST])
@pytest.mark.parametrize("case", LOW_PRECISION, ids=str)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 1e-2)], ids=["float32", "bf16"]
)
def test_backend_is_accurate_in_low_precision(
    backend: str, case: Case, dtype: torch.dtype, tolerance: float
) -> None:
    rounded = {name: x.detach().to(dtype) for name, x in case.inputs().items()}
    low = {name: x.clone().requires_grad_() for name, x in rounded.items()}
    high = {name: x.double().requires_grad_() for name, x in rounded.items()}
    found, gradients = case.run_with_gradients(backend, low)
    expected, expected_gradients = case.run_with_gradients("exact", high)
    assert found["o"].dtype == dtype
    assert found["final G"].dtype == torch.float32
    for name, x in expected.items():
        assert relative_error(found[name], x) < tolerance, name
    for name, x in expected_gradients.items():
        assert gradients[name].dtype == dtype, name
        assert relative_error(gradients[name], x) < tolerance, f"d{name}"


@pytest.mark.parametrize("backend", FAST)
def test_decays_of_fifty_a_step_leave_no_nan_in_float32(backend: str) -> None:
    case = Case(length=100, decays=(50.0, 87.0, 1000.0), normalizer="decayed", eps=1e-6)
    results, gradients = case.run_with_gradients(backend, case.inputs(torch.float32))
    for name, x in {**results, **gradients}.items():
        assert torch.isfinite(x).all(), name


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize(("write", "read"), [(1.0, 1.0), (1e6, 1e6), (1e12, 1.0), (1.0, 1e12)])
@pytest.mark.parametrize("per_head", [False, True])
def test_large_writes_and_reads_leave_no_nan_where_decays_are_steep(
    per_head: bool, write: float, read: float, normalizer: str
) -> None:
    case = Case(length=40, num_scales=2, state=False, positive=True, normalizer=normalizer)
    inputs = {name: x.detach() for name, x in case.inputs(torch.float32).items()}
    decays = torch.tensor([[-9.3, -0.1], [-9.3, -1.0] if per_head else [-9.3, -0.1]])
    inputs |= {"log_decay": decays if per_head else decays[0]}
    inputs["write"], inputs["read"] = inputs["write"] * write, inputs["read"] * read
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    wide = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    found, gradients = case.run_with_gradients("chunk", leaves)
    expected, expected_gradients = case.run_with_gradients("exact", wide)
    for name, x in (expected | expected_gradients).items():
        assert relative_error((found | gradients)[name], x) < 2e-5, name


@pytest.mark.parametrize("normalizer", ["decayed", "undecayed"])
@pytest.mark.parametrize("backend", ["exact", *FAST])
def test_denominator_never_flips_the_sign_nor_divides_by_zero(
    backend: str, normalizer: str
) -> None:
    q = torch.tensor([1.0, -1.0, 0.0]).view(1, 3, 1, 1)
    k = torch.tensor([-2.0, 1.0, 1.0]).view(1, 3, 1, 1)
    ones = torch.ones(1, 3, 1, 1)
    plain, _ = retention(q, k, ones, ones, torch.zeros(1), normalizer="none", backend=backend)
    o, _ = retention(q, k, ones, ones, torch.zeros(1), normalizer=normalizer, backend=backend)
    assert torch.isfinite(o).all()
    assert torch.equal(o.sign(), plain.sign())


def test_no_gradient_means_no_states_are_kept_and_the_same_output() -> None:
    case = Case(length=90)
    inputs = case.inputs()
    with small_pieces():
        tracked = case.run("chunk", inputs)["o"]
        with torch.no_grad():
            free = case.run("chunk", inputs)["o"]
    assert torch.equal(tracked, free)


@pytest.mark.parametrize("name", ["q", "k", "v", "write", "log_decay", "read", "G", "b"])
def test_chunk_gradient_to_one_input_alone(name: str) -> None:
    case = Case(length=50)
    inputs = {key: x.detach() for key, x in case.inputs().items()}
    inputs[name].requires_grad_()
    found, expected = (
        torch.autograd.grad(case.run(backend, inputs)["o"].square().sum(), inputs[name])[0]
        for backend in ("chunk", "exact")
    )
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("backend", ["exact", *FAST])
def test_inputs_may_lie_in_memory_in_any_order(backend: str) -> None:
    inputs = {name: x.detach() for name, x in Case(batch=2, length=20).inputs().items()}
    # Heads outermost, as einsum leaves its results; and all axes the other way round.
    moved = {
        name: x if name == "log_decay" else x.movedim(2, 0).contiguous().movedim(0, 2)
        for name, x in inputs.items()
    }
    turned = {name: x.permute(*range(x.ndim)[::-1]).contiguous() for name, x in inputs.items()}
    turned = {name: x.permute(*range(x.ndim)[::-1]) for name, x in turned.items()}
    expected = Case().run(backend, inputs)
    for tensors in (moved, turned):
        found = Case().run(backend, tensors)
        for name, x in expected.items():
            torch.testing.assert_close(found[name], x, msg=name)
