from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layers.cases import HIDDEN, KINDS, SIZES, in_pieces, layer_of, masks, unpadded
from vort.fractional import PowerLawBasis, gl_kernel
from vort.layers import LayerStates, VortAttention
from vort.memories import MEMORIES, LayerSettings, MemoryOutput, NoMemory
from vort.ops.retention import exact_retention_with_kernel

LAYERS = {kind: layer_of(kind).eval() for kind in KINDS}
CLOSE = {"atol": 2e-5, "rtol": 1e-4}


@pytest.mark.parametrize("kind", KINDS)
@given(mask=masks(), seed=st.integers(0, 9))
@settings(max_examples=15)
@torch.no_grad()
def test_padding_on_any_side_changes_nothing(kind: str, mask: torch.Tensor, seed: int) -> None:
    layer = LAYERS[kind]
    x = torch.randn(*mask.shape, HIDDEN, generator=torch.Generator().manual_seed(seed))
    junk = x.masked_fill(~mask[..., None], 1e4)
    torch.testing.assert_close(layer(junk, mask)[0], unpadded(layer, x, mask), **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
@given(mask=masks(), data=st.data())
@settings(max_examples=15)
@torch.no_grad()
def test_pieces_of_any_length_equal_the_whole(
    kind: str, mask: torch.Tensor, data: st.DataObject
) -> None:
    layer = LAYERS[kind]
    cuts = sorted(data.draw(st.lists(st.integers(0, mask.shape[1]), max_size=4)))
    x = torch.randn(*mask.shape, HIDDEN)
    torch.testing.assert_close(in_pieces(layer, x, cuts), layer(x)[0], **CLOSE)
    padded = in_pieces(layer, x, cuts, mask)
    torch.testing.assert_close(padded, unpadded(layer, x, mask), **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
@given(lengths=st.lists(st.integers(0, 25), min_size=1, max_size=4).filter(any))
@settings(max_examples=8)
@torch.no_grad()
def test_packed_sequences_equal_separate_ones(kind: str, lengths: list[int]) -> None:
    layer = LAYERS[kind]
    parts = [torch.randn(1, length, HIDDEN) for length in lengths]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    expected = torch.cat([layer(part)[0] for part in parts if part.shape[1]], 1)
    packed = torch.cat(parts, 1)
    torch.testing.assert_close(layer(packed, cu_seqlens=bounds)[0], expected, **CLOSE)
    states = LayerStates()
    kept, _ = layer(packed, cu_seqlens=bounds, past_key_values=states, use_cache=True)
    torch.testing.assert_close(kept, expected, **CLOSE)
    twice, _ = layer(packed, cu_seqlens=bounds, past_key_values=states, use_cache=True)
    doubled = [layer(torch.cat([part, part], 1))[0][:, part.shape[1] :] for part in parts]
    torch.testing.assert_close(twice, torch.cat(doubled, 1), **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_future_never_reaches_the_past(kind: str) -> None:
    layer, x = LAYERS[kind], torch.randn(1, 30, HIDDEN)
    changed = x.clone()
    changed[:, 20:] += 100
    before, after = layer(x)[0][:, :20], layer(changed)[0][:, :20]
    torch.testing.assert_close(before, after, atol=0, rtol=0)


def test_the_layer_is_the_papers_equation() -> None:
    """One head, no additions: the exact GL kernel of each token's order, and softmax near by."""
    torch.manual_seed(0)
    layer = VortAttention(
        hidden_size=HIDDEN,
        num_attention_heads=1,
        sliding_window=1,
        horizon=1000,
        num_scales=16,
        use_entropy=False,
        conv_size=0,
        qk_norm=False,
        output_norm=False,
        output_gate=False,
        write_gate=False,
        read_weights=False,
        feature_map="elu",
    ).double()
    x = torch.randn(1, 50, HIDDEN, dtype=torch.float64)
    output, _, order = layer(x, output_orders=True)
    q, k, v = (p(x).unsqueeze(2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    phi_q, phi_k = layer.memory.key_map(q), layer.memory.key_map(k)
    retrieved = exact_retention_with_kernel(phi_q, phi_k, v, order, gl_kernel)
    expected = layer.o_proj((retrieved + v).flatten(2))
    torch.testing.assert_close(output, expected, atol=2e-3, rtol=2e-3)


@torch.no_grad()
def test_half_precision_stays_near_single() -> None:
    layer, x = layer_of("vort").eval(), torch.randn(2, 60, HIDDEN)
    expected, _ = layer(x)
    output, _ = layer.bfloat16()(x.bfloat16())
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, atol=0.06, rtol=0.06)


@torch.no_grad()
def test_a_new_horizon_keeps_weights_and_scales_and_changes_rates() -> None:
    layer = VortAttention(**SIZES, horizon=1000, num_scales=8)
    weights = {name: x.clone() for name, x in layer.state_dict().items()}
    slow = layer.memory.router.log_decay(torch.device("cpu"))[1].item()
    layer.set_horizon(8192)
    router = layer.memory.router
    assert (router.horizon, router.num_scales, router.basis.horizon) == (8192, 8, 8192)
    assert slow < router.log_decay(torch.device("cpu"))[1].item() < 0
    for name, x in layer.state_dict().items():
        torch.testing.assert_close(x, weights[name], atol=0, rtol=0)
    assert layer(torch.randn(1, 9, HIDDEN))[0].isfinite().all()


def test_a_tolerance_says_how_many_scales_a_layer_takes() -> None:
    scales = PowerLawBasis.fit(horizon=100, tolerance=0.05).terms
    layer = VortAttention(**SIZES, horizon=100, num_scales=scales)
    assert layer.memory.router.basis.certificate.relative <= 0.05
    assert layer.memory.num_scales == scales < 8


def test_the_paper_layer_has_what_the_paper_has_and_nothing_else() -> None:
    banks, scales, features = 4, 6, 32
    layer = VortAttention.paper(
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_banks=banks,
        num_scales=scales,
        num_features=features,
    )
    router = layer.memory.router
    # Order 1, the last bank, is a constant kernel: one scale, where the others have S.
    assert router.num_scales == (banks - 1) * scales + 1
    assert layer.memory.key_map.output_dim == features
    assert router.gates.write is None
    assert router.gates.read is None
    extras = (layer.convolution, layer.norm, layer.g_proj, layer.q_norm, layer.k_norm)
    assert all(extra is None for extra in extras)
    # W_a sees [x; H; e].
    assert router.order.in_features == HIDDEN + 1 + 1
    routing = router(torch.randn(1, 7, HIDDEN))
    assert routing.read is None
    assert set((routing.write != 0).sum(-1).flatten().tolist()) <= {1, scales}


@torch.no_grad()
def test_state_stays_the_same_size_while_decoding() -> None:
    layer, states, sizes = LAYERS["vort"], LayerStates(), []
    for _ in range(20):
        layer(torch.randn(2, 1, HIDDEN), past_key_values=states, use_cache=True)
        sizes.append(sum(x.nbytes for x in states.load_state(0).values()))
    assert len(set(sizes)) == 1
    counted = sum(x[0].numel() for x in states.load_state(0).values())
    assert counted == layer.state_size() + 1  # and the count of positions


def test_gradients_reach_every_parameter() -> None:
    layer = layer_of("undecayed")
    output, _ = layer(torch.randn(2, 20, HIDDEN), entity_mask=torch.ones(2, 20))
    output.square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_gradients_flow_through_padding_alike() -> None:
    layer, x = layer_of("vort"), torch.randn(1, 20, HIDDEN)
    layer(x)[0].square().sum().backward()
    alone = {name: p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad()
    padded = torch.cat([torch.full((1, 7, HIDDEN), 1e3), x], 1)
    mask = torch.cat([torch.zeros(1, 7), torch.ones(1, 20)], 1)
    layer(padded, mask)[0].square().sum().backward()
    for name, p in layer.named_parameters():
        torch.testing.assert_close(p.grad, alone[name], atol=1e-4, rtol=1e-3)


def test_errors_name_the_argument() -> None:
    layer, x = LAYERS["vort"], torch.randn(2, 6, HIDDEN)
    with pytest.raises(ValueError, match=r"attention_mask must be \[2, 6 or more\]"):
        layer(x, torch.ones(3, 6))
    with pytest.raises(ValueError, match="attention_mask must cover 6 positions, got 4"):
        layer(x, torch.ones(2, 4))
    with pytest.raises(ValueError, match="1 at tokens and 0 at padding, got one that is added"):
        layer(x, torch.full((2, 6), -1e9))
    with pytest.raises(ValueError, match="use_cache=True needs past_key_values"):
        layer(x, use_cache=True)
    with pytest.raises(ValueError, match="not both"):
        layer(x, torch.ones(2, 6), cu_seqlens=torch.tensor([0, 6]))
    with pytest.raises(ValueError, match="num_key_value_heads must divide num_attention_heads = 2"):
        VortAttention(**SIZES, num_key_value_heads=3)
    with pytest.raises(ValueError, match="conv_size must be at least 2"):
        VortAttention(**SIZES, conv_size=1)
    with pytest.raises(ValueError, match="feature_map must be one of"):
        VortAttention(**SIZES, feature_map="cosine")
    with pytest.raises(TypeError, match="VortAttention has no setting 'num_heads'"):
        VortAttention(hidden_size=HIDDEN, num_heads=2)
    with pytest.raises(TypeError, match="set_horizon needs a memory with orders"):
        LAYERS["gla"].set_horizon(10)


def test_a_memory_of_ones_own_brings_its_settings() -> None:
    memory = NoMemory(**SIZES, conv_size=0)
    layer = VortAttention(memory=memory)
    assert layer.memory is memory
    assert (layer.window, layer.convolution) == (SIZES["sliding_window"], None)
    with pytest.raises(ValueError, match="settings are given, so these have no use: horizon"):
        VortAttention(memory=memory, horizon=3)


def test_a_memory_of_ones_own_that_cannot_be_meant_is_refused() -> None:
    memory = NoMemory(**SIZES, conv_size=0)
    wide = LayerSettings(**{**SIZES, "hidden_size": 2 * HIDDEN})
    with pytest.raises(ValueError, match="must be those of the memory"):
        VortAttention(wide, memory=memory)
    for wrong in (NoMemory, torch.nn.Linear(2, 2)):
        with pytest.raises(TypeError, match="memory must be a name or a Memory that is built, got"):
            VortAttention(memory=wrong)


class Silent(NoMemory):
    """Gives no state, though nothing says that it keeps none; and too little."""

    few = False

    def forward(self, inputs: Any, state: Any = None, *, output_state: bool = False) -> Any:
        found = super().forward(inputs, state).output
        return MemoryOutput(found[:, :1] if self.few else found)


def test_a_memory_that_gives_less_than_it_says_is_refused() -> None:
    layer, x = VortAttention(memory=Silent(**SIZES)), torch.randn(2, 5, HIDDEN)
    layer(x)
    with pytest.raises(ValueError, match=r"Silent must give its state.*or set keeps_state"):
        layer(x, past_key_values=LayerStates(), use_cache=True)
    layer.memory.few = True
    with pytest.raises(ValueError, match=r"an output for each of \[2, 5, 2\].*got \[2, 1, 2, 8\]"):
        layer(x)


@pytest.mark.parametrize("part", ["sliding_window", "conv_size"])
def test_states_of_a_layer_with_other_parts_are_refused(part: str) -> None:
    layers = VortAttention(**SIZES), VortAttention(**{**SIZES, part: 0})
    x = torch.randn(2, 5, HIDDEN)
    for one, other in (layers, layers[::-1]):
        states = LayerStates()
        one(x, past_key_values=states, use_cache=True)
        with pytest.raises(ValueError, match="past_key_values must be of this layer, got those of"):
            other(x, past_key_values=states, use_cache=True)


PARTS = ("convolution", "q_norm", "k_norm", "norm")


@pytest.mark.parametrize("name", PARTS)
def test_whoever_watches_a_part_sees_each_call_and_changes_nothing(name: str) -> None:
    layer, x, calls = layer_of("vort"), torch.randn(2, 9, HIDDEN), []
    mask = torch.ones(2, 9)
    mask[1, :4] = 0
    expected = [layer(x)[0], layer(x, mask)[0], in_pieces(layer, x, [5, 6, 7])]
    layer.get_submodule(name).register_forward_hook(lambda *given: calls.append(name))
    found = [layer(x)[0], layer(x, mask)[0], in_pieces(layer, x, [5, 6, 7])]
    assert len(calls) == 6
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", PARTS)
@torch.no_grad()
def test_what_takes_the_place_of_a_part_is_called(name: str) -> None:
    layer, x = layer_of("vort"), torch.randn(2, 9, HIDDEN)
    part = layer.get_submodule(name)

    class Other(type(part)):  # type: ignore[misc]
        def forward(self, *given: Any, **options: Any) -> Any:
            found = super().forward(*given, **options)
            return (found[0] + 1, found[1]) if name == "convolution" else found + 1

    before = layer(x)[0]
    part.__class__ = Other
    assert (before - layer(x)[0]).abs().max() > 1e-3


@torch.no_grad()
def test_a_norm_of_keys_alone_is_one() -> None:
    layer, x = layer_of("vort"), torch.randn(2, 9, HIDDEN)
    layer.q_norm = None
    before = layer(x)[0]
    layer.k_norm = None
    assert (before - layer(x)[0]).abs().max() > 1e-3


@pytest.mark.parametrize("name", [name for name in MEMORIES if MEMORIES[name].keeps_state])
@pytest.mark.parametrize(("held", "rows", "length"), [(1, 2, 1), (1, 2, 5), (3, 1, 1), (3, 1, 5)])
@torch.no_grad()
def test_a_state_of_other_rows_is_refused(name: str, held: int, rows: int, length: int) -> None:
    options: dict[str, Any] = {**SIZES, "memory": name, "horizon": 100, "sliding_window": 0}
    layer, states = VortAttention(**options, conv_size=0, use_entropy=False), LayerStates()
    layer(torch.randn(held, 4, HIDDEN), past_key_values=states, use_cache=True)
    if name == "none":  # it keeps nothing, so all fits
        assert states.load_state(0) is None
        return
    with pytest.raises(
        ValueError, match=f"as many sequences as there are rows, {rows}, got {held}"
    ):
        layer(torch.randn(rows, length, HIDDEN), past_key_values=states, use_cache=True)
