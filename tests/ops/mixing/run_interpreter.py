"""Claims about the kernels, for Triton's interpreter; see `tests.ops.interpreter`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from tests.ops.interpreter import check_claim, kernels_everywhere
from tests.ops.mixing.cases import CASES, SIZES, difference, dots_errors, layer_results


def a_layer_at_once_is_its_ops_to_the_bit() -> None:
    """Outputs and all gradients, whatever the layer is made of."""
    with kernels_everywhere(True):
        errors = difference(torch.float32, "cpu", 0)
    assert len(errors) > 15 * len(CASES)
    assert all(error == 0 for error in errors.values()), errors


def sums_together_are_those_alone() -> None:
    """Of several shapes and types, more than a launch takes; after an error nothing waits."""
    from vort.ops.gpu import folds

    shapes = [(1, 3), (700, 5), (40, 33), (2, 4, 8, 2), (513, 16), (3, 1)] * 2
    sums = [torch.randn(shape) for shape in shapes]
    types = [torch.float32, torch.float64, torch.float32] * 4
    alone = [folds.fold(x, dtype) for x, dtype in zip(sums, types, strict=True)]
    with mock.patch.object(folds, "launch", wraps=folds.launch) as launched:
        with folds.folded_together(), folds.folded_together():
            found = [folds.fold(x, dtype) for x, dtype in zip(sums, types, strict=True)]
            pair = folds.fold_pair(torch.ones(2, 9, 4), torch.float32)
            assert not launched.called
        assert launched.call_count == 3  # eight and two of float32, four of float64
        try:
            with folds.folded_together():
                folds.fold(sums[0], torch.float32)
                raise ValueError("in between")
        except ValueError:
            pass
        folds.fold(sums[0], torch.float32)
        assert launched.call_count == 4
    assert [x.tolist() for x in pair] == [[9.0] * 4] * 2
    for x, got, wanted in zip(sums, found, alone, strict=True):
        assert torch.equal(got, wanted)
        torch.testing.assert_close(got.double(), x.double().sum(0), rtol=1e-5, atol=1e-5)


def sums_of_few_rows_and_of_many_are_exact() -> None:
    """Around the number of rows that are few, and columns that a program has of those."""
    from vort.ops.gpu import folds

    for rows in (1, folds.FEW, folds.FEW + 1, folds.ROWS + 1):
        for width in (1, 7, folds.BROAD, 2 * folds.BROAD + 4):
            x = torch.randn(rows, width)
            got, wanted = folds.fold(x, torch.float32), x.double().sum(0)
            assert (got - wanted).norm() <= 1e-6 * x.norm(), (rows, width)


def a_backward_adds_up_in_one_launch() -> None:
    from vort.ops.gpu import folds

    with (
        kernels_everywhere(True),
        mock.patch.object(folds, "launch", wraps=folds.launch) as launched,
    ):
        layer_results({}, torch.float32, "cpu", 0, at_once=True)
    assert launched.call_count == 1


@contextmanager
def _products_in_float32() -> Iterator[None]:
    """As autocast on a GPU, with float64 and float32 in the place of float32 and bfloat16.

    The interpreter knows no bfloat16.
    """
    from vort.ops import linear, rms_norm

    def take(*tensors: torch.Tensor) -> bool:
        kinds = {x.dtype for x in tensors}
        return len(kinds) == 1 and kinds <= {torch.float32, torch.float64}

    with (
        mock.patch.object(linear, "autocasts", return_value=True),
        mock.patch.object(torch, "get_autocast_dtype", return_value=torch.float32),
        mock.patch.object(linear, "kernels_take", take),
        mock.patch.object(sys.modules[rms_norm.__module__], "kernels_take", take),
    ):
        yield


def under_autocast_sums_and_weights_are_wider_than_products() -> None:
    """And outputs and gradients are those of a layer without kernels, whatever it is made of."""
    for changes in CASES.values():
        with kernels_everywhere(True):
            options: dict[str, Any] = {"at_once": True, "lowered": torch.float32}
            around = _products_in_float32()
            got, taken = layer_results(changes, torch.float64, "cpu", 0, autocast=around, **options)
        with kernels_everywhere(False):
            wanted, _ = layer_results(changes, torch.float64, "cpu", 0, at_once=False)
        assert taken
        types = [got[n].dtype for n in ("total", "y", "dx", "ddelta", "dq_proj.weight", "dnorm")]
        wide, lowered = torch.float64, torch.float32
        assert types == [wide, lowered, wide, lowered, wide, wide]
        for name, x in wanted.items():
            assert (got[name] - x).norm() <= 2e-5 * x.norm() + 1e-6, name


def packed_sequences_at_once_are_those_apart() -> None:
    """The bounds reach convolution, window and memory; without kernels the result is the same."""
    found = []
    bounds = torch.tensor([0, 3, 3, 7])
    for kernels in (True, False):
        with kernels_everywhere(kernels):
            changes, given = {"sliding_window": 5}, {"cu_seqlens": bounds}
            found.append(
                layer_results(changes, torch.float32, "cpu", 0, at_once=kernels, given=given)
            )
    (got, taken), (wanted, _) = found
    assert taken
    for name, x in wanted.items():
        assert (got[name] - x).norm() <= 2e-5 * x.norm() + 1e-6, name


def sums_left_for_the_window_are_those_it_would_make() -> None:
    with _walks_in_float32():
        errors = dots_errors(torch.float32, "cpu", 0)
    assert len(errors) == 4 * 8 + 3
    assert all(error <= 2e-6 for error in errors.values()), errors


def the_window_of_a_layer_reads_its_output_no_more() -> None:
    """And gradients are those without kernels: of some blocks, packed, and without a window."""
    from vort.ops.local_attention.triton import attention, walk

    bounds = {"cu_seqlens": torch.tensor([0, 3, 3, 50, 70])}
    for window, given, length in ((40, None, 97), (5, bounds, 70), (0, None, 7)):
        changes, found, launched = {"sliding_window": window}, [], mock.Mock(wraps=attention.launch)
        for kernels in (True, False):
            with (
                kernels_everywhere(kernels),
                _walks_in_float32(),
                mock.patch.object(attention, "launch", launched),
            ):
                options: dict[str, Any] = {"at_once": kernels, "given": given, "length": length}
                found.append(layer_results(changes, torch.float32, "cpu", 0, **options))
        walks = [c.args for c in launched.call_args_list if c.args[0] is walk.attended_walk_kernel]
        assert len(walks) == (window > 0)
        for kernel, _, *arguments in walks:
            named = dict(zip(kernel.arg_names, arguments, strict=False))
            assert named["o"] is None
            assert named["dots"] is not None
        (got, taken), (wanted, _) = found
        assert taken
        for name, x in wanted.items():
            assert (got[name] - x).norm() <= 2e-5 * x.norm() + 1e-6, (window, name)


@contextmanager
def _walks_in_float32() -> Iterator[None]:
    """As of bfloat16 on a GPU, all gradients of a window come of one walk."""
    from vort.ops.gpu.launcher import Tile
    from vort.ops.local_attention.triton import attention

    with mock.patch.dict(attention.WALKS, {torch.float32: Tile(32, 4, 1)}):
        yield


def a_padded_model_of_kernels_equals_one_without() -> None:
    """Padding is taken out before its first layer, each of which is then one function."""
    from tests.models.cases import model_of, tokens
    from vort.layers import vort_attention
    from vort.models import modeling_vort

    model, ids, mask = model_of("vort").train(), tokens(3, 14), torch.ones(3, 14).long()
    mask[0, :4] = mask[1, 9:] = mask[2, 3:5] = 0
    given = {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    at_once, found = vort_attention.attention_at_once, []
    for kernels in (True, False):
        with (
            kernels_everywhere(kernels),
            mock.patch.object(modeling_vort, "packs_well", return_value=kernels),
            mock.patch.object(vort_attention, "attention_at_once", wraps=at_once) as called,
        ):
            loss = model(ids, **given, use_cache=False).loss
            grads = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
        shapes = {tuple(call.args[2].shape[:2]) for call in called.call_args_list}
        assert shapes == ({(1, int(mask.sum()))} if kernels else set())
        found.append([loss, *grads])
    for got, wanted in zip(*found, strict=True):
        assert (got - wanted).norm() <= 2e-5 * wanted.norm() + 1e-6


def bounds_are_looked_at_once_a_model() -> None:
    """Two layers, forward and back, share what follows from the bounds."""
    from vort.layers import VortAttention
    from vort.ops.retention.triton import spans

    with (
        kernels_everywhere(True),
        mock.patch.object(spans, "_span_table", wraps=spans._span_table) as made,
    ):
        x, bounds = torch.randn(1, 7, 32, requires_grad=True), torch.tensor([0, 3, 7])
        for _ in range(2):
            x, _ = VortAttention(**SIZES)(x, cu_seqlens=bounds)
        x.sum().backward()
    assert made.call_count == 1


def what_is_watched_or_unknown_goes_op_by_op() -> None:
    """Hooks are called, and what kernels do not know is left to its modules."""
    from vort.layers import VortAttention
    from vort.layers.at_once import attention_at_once

    with kernels_everywhere(True):
        x = torch.randn(1, 7, 32)
        assert attention_at_once(VortAttention(**SIZES), None, x, None) is not None
        names = [
            "q_proj", "g_proj", "o_proj", "convolution", "q_norm", "norm", "memory",
            "memory.key_map", "memory.router", "memory.router.order", "memory.router.gates",
            "memory.router.gates.read",
        ]  # fmt: skip
        for name in names:
            layer = VortAttention(**SIZES)
            layer.get_submodule(name).register_forward_hook(lambda *given: None)
            assert attention_at_once(layer, None, x, None) is None, name
        unknown = (
            {"feature_map": "elu", "num_features": None}, {"rope_theta": None},
            {"learn_basis": True}, {"num_attention_heads": 1},
            {"memory": "exponential"}, {"num_key_value_heads": 1}, {"attention_bias": True},
            {"routing": "banks", "num_banks": 2}, {"order_input": "values"},
        )  # fmt: skip
        for changes in unknown:
            layer = VortAttention(**(SIZES | changes))
            assert attention_at_once(layer, None, x, None) is None, changes


def a_memory_of_ones_own_is_called() -> None:
    from vort.layers import VortAttention
    from vort.memories.retention_memory import Routing
    from vort.memories.vort import VortMemory

    class Silent(VortMemory):
        def route(self, inputs: object) -> Routing:
            routing = super().route(inputs)  # type: ignore[arg-type]
            return routing._replace(write=routing.write * 0)

    with kernels_everywhere(True):
        layer = VortAttention(memory=Silent(**SIZES))
        x = torch.randn(1, 7, 32)
        with mock.patch.object(layer.memory, "route", wraps=layer.memory.route) as called:
            layer(x)
    assert called.called


def heads_that_nothing_turns_are_no_features_to_the_window() -> None:
    """Without RoPE memory and window share their heads: the window must not see a map of them."""
    from vort.layers import VortAttention

    layer = VortAttention(**(SIZES | {"rope_theta": None}))
    x, found = torch.randn(2, 9, 32), []
    for kernels in (True, False):
        with kernels_everywhere(kernels):
            found.append(layer(x)[0])
    assert (found[0] - found[1]).norm() <= 1e-5 * found[1].norm()


if __name__ == "__main__":
    check_claim()
