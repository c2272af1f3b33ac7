"""How well FAVOR+ stands for exp(q·k/sqrt(d)), and that its stabilisers are sound."""

import math

import pytest
import torch
from torch import Tensor

from vort.ops.feature_maps import FavorFeatures, draw_projection, favor_features

DIM = 16


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pairs(count: int = 32, length: float = 1.0) -> tuple[Tensor, Tensor]:
    """Queries and keys of scaled length |x|/d^(1/4) = `length`."""
    x = torch.randn(2, count, DIM, dtype=torch.float64, generator=seeded(0))
    x = x / x.norm(dim=-1, keepdim=True) * length * DIM**0.25
    return x[0], x[1]


def estimates(m: int, draws: int, orthogonal: bool, length: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return estimates [draws, pairs] and the truth [pairs]."""
    q, k = pairs(length=length)
    values = []
    for draw in range(draws):
        w = draw_projection(m, DIM, orthogonal=orthogonal, generator=seeded(draw + 1))
        values.append((favor_features(q, w) * favor_features(k, w)).sum(-1))
    return torch.stack(values), ((q * k).sum(-1) / DIM**0.5).exp()


def relative_error(m: int, draws: int, orthogonal: bool) -> float:
    estimate, truth = estimates(m, draws, orthogonal)
    return (estimate / truth - 1).square().mean().sqrt().item()


@pytest.mark.parametrize("orthogonal", [True, False])
def test_error_falls_as_one_over_the_root_of_the_features(orthogonal: bool) -> None:
    sizes = [16, 64, 256, 1024]
    errors = [relative_error(m, 150, orthogonal) for m in sizes]
    slope = math.log(errors[-1] / errors[0]) / math.log(sizes[-1] / sizes[0])
    print(f"orthogonal={orthogonal}: rms relative error {dict(zip(sizes, errors, strict=True))}")
    assert -0.6 < slope < -0.4
    # Independent rows have relative variance (exp(|x + y|²) - 1)/m; orthogonal ones have no more.
    q, k = pairs()
    theory = (((q + k).square().sum(-1) / DIM**0.5).exp() - 1).mean().div(sizes[-1]).sqrt()
    assert errors[-1] < 1.15 * theory


@pytest.mark.parametrize("m", [16, 64])
def test_orthogonal_rows_beat_independent_ones(m: int) -> None:
    assert relative_error(m, 600, True) < 0.95 * relative_error(m, 600, False)


@pytest.mark.parametrize("orthogonal", [True, False])
@pytest.mark.parametrize("m", [5, 24])
def test_estimate_is_unbiased(orthogonal: bool, m: int) -> None:
    # The mean over draws lies within 4.5 standard errors for all 32 pairs (p < 3e-4 if unbiased).
    estimate, truth = estimates(m, 3000, orthogonal, length=0.6)
    error = estimate.mean(0) - truth
    standard_error = estimate.std(0) / estimate.shape[0] ** 0.5
    assert (error.abs() / standard_error).max() < 4.5
    assert (standard_error / truth).max() < 0.02


def test_projection_rows_have_gaussian_lengths_and_orthogonal_blocks() -> None:
    w = draw_projection(4000, DIM, generator=seeded(1)).double()
    gram = w[:DIM] @ w[:DIM].T
    torch.testing.assert_close(gram, gram.diagonal().diag(), atol=1e-5, rtol=0)
    assert abs(w.square().sum(-1).mean() / DIM - 1) < 0.03
    covariance = w.T @ w / 4000
    assert (covariance - torch.eye(DIM)).abs().max() < 0.1


def test_same_seed_same_features_and_redraw_changes_them() -> None:
    a, b = (FavorFeatures(DIM, 40, generator=seeded(7)) for _ in range(2))
    x = torch.randn(3, DIM)
    assert torch.equal(a(x), b(x))
    assert "projection" in a.state_dict()
    a.redraw(seeded(8))
    assert not torch.equal(a(x), b(x))
    b.redraw(seeded(8))
    assert torch.equal(a(x), b(x))


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4, 1e15, 1e30])
@pytest.mark.parametrize("head_dim", [4, 64, 256])
def test_no_norm_overflows_or_loses_a_position(scale: float, head_dim: int) -> None:
    phi = FavorFeatures(head_dim, 64, generator=seeded(1))
    w = phi.projection
    # The largest exponents belong to keys along a row; the faintest keys lie against one and
    # across all others, where exp(-max_norm²/2)/sqrt(m) is left.
    aligned = w / w.norm(dim=-1, keepdim=True)
    x = scale * torch.cat([torch.randn(64, head_dim), aligned, -aligned])
    for features in (phi(x), phi.map_query(x)):
        assert features.isfinite().all()
        assert (features.amax(-1) > 0.9 * math.exp(-18) / 8).all()
        assert features[:64].amax(-1).median() > 1e-4
    million = 1e6 * (phi(x) @ phi(x).T)
    assert million.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types_do_not_overflow(dtype: torch.dtype) -> None:
    phi = FavorFeatures(128, 64, generator=seeded(1))
    assert phi((50 * phi.projection).to(dtype)).isfinite().all()


def test_bounds_leave_ordinary_inputs_alone() -> None:
    phi = FavorFeatures(64, 128, generator=seeded(1))
    x = torch.randn(1000, 64, generator=seeded(2))
    x = x / x.square().mean(-1, keepdim=True).sqrt()  # as an RMS norm leaves it
    scaled = x / 64**0.25
    plain = (scaled @ phi.projection.T - scaled.square().sum(-1, keepdim=True) / 2).exp() / 128**0.5
    torch.testing.assert_close(phi(x), plain, rtol=1e-5, atol=0)


def test_query_shift_cancels_under_a_normaliser_and_key_weights_are_kept() -> None:
    phi = FavorFeatures(DIM, 64, generator=seeded(1)).double()
    q, k, v = torch.randn(3, 20, DIM, dtype=torch.float64)

    def read(features: Tensor) -> Tensor:
        weights = (features @ phi(k).T).tril()
        return weights @ v / weights.sum(-1, keepdim=True)

    torch.testing.assert_close(read(phi.map_query(q)), read(phi(q)))
    assert torch.equal(phi.map_query(q).amax(-1), torch.full((20,), 1 / 8, dtype=torch.float64))


@pytest.mark.parametrize("scale", [1.0, 2.0, 5.0, 100.0])
def test_long_vectors_are_read_in_float32_with_a_small_constant(scale: float) -> None:
    phi = FavorFeatures(64, 64, generator=seeded(1))
    q, k, v = torch.randn(3, 100, 64, generator=seeded(2)) * torch.tensor([scale, scale, 1.0]).view(
        3, 1, 1
    )
    q.requires_grad_()
    k.requires_grad_()
    for query in (phi.map_query(q), phi(q)):
        weights = (query @ phi(k).T).tril()
        o = weights @ v / (weights.sum(-1, keepdim=True) + 1e-20)
        torch.testing.assert_close(o[0], v[0], rtol=1e-4, atol=1e-4)
        assert (o.abs() <= v.abs().amax(0) * 1.0001).all()
        for gradient in torch.autograd.grad(o.square().sum(), (q, k)):
            assert gradient.isfinite().all()


def test_features_of_a_key_do_not_depend_on_company() -> None:
    phi = FavorFeatures(DIM, 64, generator=seeded(1))
    k = torch.randn(9, DIM)
    torch.testing.assert_close(torch.stack([phi(row) for row in k]), phi(k))


@pytest.mark.parametrize("length", [0.0, 1.0, 20.0])
def test_features_can_be_differentiated_twice_at_zeros_too(length: float) -> None:
    phi = FavorFeatures(4, 6, generator=seeded(1)).double()
    x = (length * torch.randn(3, 4, dtype=torch.float64, generator=seeded(2))).requires_grad_()
    assert torch.autograd.gradgradcheck(phi, x)
    if length:  # of zeros all exponents are the largest
        assert torch.autograd.gradgradcheck(phi.map_query, x)
