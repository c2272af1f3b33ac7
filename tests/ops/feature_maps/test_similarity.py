"""What the inner product of each deterministic map stands for."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from vort.ops.feature_maps import (
    HedgehogFeatures,
    elu_features,
    hedgehog_features,
    relu_features,
    taylor_features,
)


@given(d=st.integers(1, 24), scale=st.floats(0.01, 10), seed=st.integers(0, 2**31))
def test_taylor_product_is_exactly_the_second_order_expansion(
    d: int, scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k = scale * torch.randn(2, 7, d, dtype=torch.float64, generator=generator)
    s = q @ k.T / d**0.5
    product = taylor_features(q) @ taylor_features(k).T
    torch.testing.assert_close(product, 1 + s + s**2 / 2, rtol=1e-10, atol=1e-10)


def test_elu_features_stay_positive_where_elu_plus_one_rounds_to_zero() -> None:
    x = torch.tensor([-50.0, -17.5, -1.0, 0.0, 3.0])
    assert (elu_features(x) > 0).all()
    torch.testing.assert_close(elu_features(x), torch.nn.functional.elu(x) + 1)


def test_relu_features_are_relu() -> None:
    x = torch.randn(5, 4)
    assert torch.equal(relu_features(x), x.clamp(min=0))


def test_each_half_of_hedgehog_sums_to_one() -> None:
    x, weight = torch.randn(5, 3, 6), torch.randn(3, 6, 4)
    features = hedgehog_features(x, weight)
    torch.testing.assert_close(features.unflatten(-1, (2, 4)).sum(-1), torch.ones(5, 3, 2))
    for head in range(3):
        alone = hedgehog_features(x[:, head], weight[head])
        torch.testing.assert_close(features[:, head], alone)


def test_hedgehog_starts_as_a_softmax_of_the_coordinates_and_learns() -> None:
    phi = HedgehogFeatures(6, num_heads=2)
    x = torch.randn(4, 2, 6)
    torch.testing.assert_close(phi(x), torch.cat([x.softmax(-1), (-x).softmax(-1)], -1))
    phi(x).square().sum().backward()
    assert phi.weight.grad is not None
    assert phi.weight.grad.abs().amax(dim=(1, 2)).min() > 0


def test_wide_hedgehog_has_no_two_equal_features() -> None:
    weight = HedgehogFeatures(4, 16).weight.detach()
    distances = torch.cdist(weight.T, weight.T) + torch.eye(8)
    assert distances.min() > 1e-3
