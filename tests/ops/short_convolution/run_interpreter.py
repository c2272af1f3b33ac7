"""Claims about the kernels, for Triton's interpreter; see `tests.ops.interpreter`."""

from unittest import mock

import torch

from tests.ops.interpreter import check_claim, kernels_everywhere
from tests.ops.short_convolution.cases import (
    CASES,
    LONG,
    STEPS,
    WEIGHTS,
    relative_errors,
    step_errors,
)

BOUND = 2e-6


def every_output_and_gradient_equals_exact() -> None:
    for seed, case in enumerate(CASES):
        errors = relative_errors(case, torch.float32, "cpu", seed)
        assert all(error <= BOUND for error in errors.values()), (case.name, errors)


def many_blocks_equal_exact() -> None:
    from vort.ops.gpu.launcher import Tile
    from vort.ops.short_convolution.triton import op

    small = dict.fromkeys((2, 4), (Tile(16, 4, 1), Tile(16, 4, 1)))
    op.FORWARD, op.BACKWARD, op.PROGRAMS, op.TAPS, op.SPAN = small, small, 6, Tile(2, 4, 1), 8
    for seed, case in enumerate(LONG):
        errors = relative_errors(case, torch.float32, "cpu", seed)
        assert all(error <= BOUND for error in errors.values()), (case.name, errors)


def turned_again_equal_the_first() -> None:
    from tests.ops.short_convolution.cases import make_inputs
    from vort.ops.short_convolution.triton import Inputs, heads_fused, turn_table, turned_again

    for seed, case in enumerate(c for c in CASES if c.rope and not c.seen and c.bounds is None):
        given = make_inputs(case, torch.float32, "cpu", seed)
        x, weight, q_norm, k_norm, *maps = (given[n] for n in WEIGHTS)
        cos, sin = turn_table(case.length, case.dim, 1e4, torch.device("cpu"))
        maps = maps if case.features else [None, None]
        inputs = Inputs(
            x, weight, given["state"], None, q_norm, k_norm, cos, sin, *maps, case.heads,
            case.kv_heads, 1e-6, True,
        )  # fmt: skip
        for once, again in zip(heads_fused(inputs)[3:5], turned_again(inputs), strict=True):
            assert torch.equal(once, again), case.name


def obeys_torch_library() -> None:
    from tests.ops.short_convolution.cases import HeadsCase, make_inputs
    from vort.ops.short_convolution.triton import Inputs, heads_fused, turn_table

    given = make_inputs(HeadsCase(length=5, features=4), torch.float32, "cpu", 0)
    x, weight, q_norm, k_norm, *maps = (given[n].requires_grad_() for n in WEIGHTS)
    cos, sin = turn_table(5, 8, 10000.0, torch.device("cpu"))
    rest = (q_norm, k_norm, cos, sin, *maps)
    inputs = Inputs(x, weight, None, None, *rest, 2, 2, 1e-6, False)
    heads_fused(inputs)
    torch.library.opcheck(torch.ops.vort.heads.default, tuple(inputs))


def steps_in_place_equal_the_whole() -> None:
    for seed, case in enumerate(STEPS):
        errors = step_errors(case, torch.float32, "cpu", seed)
        assert all(error <= BOUND for error in errors.values()), (case.name, errors)


def who_watches_a_memory_sees_heads() -> None:
    """Features are made with the heads, but not where a hook waits for queries and keys."""
    from vort.layers import VortAttention
    from vort.plasticity import record_memories

    with kernels_everywhere(True):
        layer = VortAttention(hidden_size=16, num_attention_heads=2, num_features=4, horizon=100)
        x = torch.randn(1, 5, 16)
        with mock.patch.object(layer.memory, "_map", side_effect=AssertionError):
            alone, _ = layer(x)
        with record_memories(layer) as found:
            watched, _ = layer(x)
    _, inputs = found[0]
    assert not inputs.mapped
    assert inputs.q.shape[-1] == 8
    assert (alone - watched).norm() <= 1e-5 * watched.norm()


def a_layer_without_a_convolution_takes_them_too() -> None:
    from vort.layers import VortAttention
    from vort.ops.short_convolution.triton import op

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_features": 4, "horizon": 100}
    layer = VortAttention(**sizes, conv_size=0, sliding_window=0, use_entropy=False)
    x, back = torch.randn(2, 3, 7, 16).unbind()
    found = []
    for kernels in (True, False):
        given = x.clone().requires_grad_()
        with (
            kernels_everywhere(kernels),
            mock.patch.object(op, "empty_heads", wraps=op.empty_heads) as made,
        ):
            y, _ = layer(given)
            grads = torch.autograd.grad(y, [given, *layer.parameters()], back)
        assert made.called == kernels
        found.append([y, *grads])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


if __name__ == "__main__":
    check_claim()
