"""Claims that hold for every feature map: dimension, sign, precision, causality, errors."""

import pytest
import torch

from vort.ops.feature_maps import FEATURE_MAPS, FeatureMap, feature_map

NAMES = sorted(FEATURE_MAPS)
HEAD_DIM = 8


def build(name: str, head_dim: int = HEAD_DIM) -> FeatureMap:
    options = {"generator": torch.Generator().manual_seed(3)} if name == "favor" else {}
    return feature_map(name, head_dim, **options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(2, 5, 3, HEAD_DIM), (HEAD_DIM,), (1, 0, 2, HEAD_DIM)])
def test_output_has_the_stated_dimension(name: str, shape: tuple[int, ...]) -> None:
    phi = build(name)
    features = phi(torch.randn(shape))
    assert features.shape == (*shape[:-1], phi.output_dim)
    assert phi.map_query(torch.randn(shape)).shape == features.shape


@pytest.mark.parametrize("name", NAMES)
def test_positive_maps_have_no_negative_similarity(name: str) -> None:
    phi = build(name)
    q, k = phi(3 * torch.randn(64, HEAD_DIM)), phi(3 * torch.randn(64, HEAD_DIM))
    assert ((q @ k.T).min() >= 0).item() == phi.is_positive


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", ["forward", "map_query"])
def test_changing_position_t_leaves_earlier_features_bit_identical(name: str, method: str) -> None:
    phi = build(name)
    x = torch.randn(2, 17, 3, HEAD_DIM)
    for t in (1, 8, 16):
        changed = x.clone()
        changed[:, t:] = 100 * torch.randn_like(changed[:, t:])
        before, after = getattr(phi, method)(x), getattr(phi, method)(changed)
        assert torch.equal(before[:, :t], after[:, :t])
        if name != "identity":
            assert not torch.equal(before[:, t:], after[:, t:])


@pytest.mark.parametrize("name", NAMES)
def test_low_precision_is_computed_in_float32_and_cast_back(name: str) -> None:
    phi = build(name)
    x = torch.randn(4, 6, 2, HEAD_DIM).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features = phi(x)
    assert features.dtype == torch.bfloat16
    assert torch.equal(features, phi(x.float()).bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(phi(x.float()), phi(x.float()))
        assert phi(x.float()).dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", ["forward", "map_query"])
def test_gradients_are_right(name: str, method: str) -> None:
    phi = build(name, 4).double()
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(getattr(phi, method), (x,))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [0.0, 1e3, 1e8])
def test_extreme_norms_stay_finite_with_finite_gradients(name: str, scale: float) -> None:
    phi = build(name)
    x = (scale * torch.randn(5, 3, HEAD_DIM)).requires_grad_()
    features = phi(x)
    assert features.isfinite().all()
    (features / features.detach().abs().amax().clamp(min=1)).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_restores_the_map(name: str) -> None:
    phi, other = build(name), feature_map(name, HEAD_DIM)
    if name == "hedgehog":
        torch.nn.init.normal_(phi.weight)
    other.load_state_dict(phi.state_dict())
    x = torch.randn(4, HEAD_DIM)
    assert torch.equal(phi(x), other(x))


@pytest.mark.parametrize("name", NAMES)
def test_compiled_map_agrees(name: str) -> None:
    phi = build(name)
    x = torch.randn(2, 5, 3, HEAD_DIM)
    compiled = torch.compile(phi, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), phi(x))


def test_unknown_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match=r"name must be one of favor, .*identity, got 'cosine'"):
        feature_map("cosine", 8)


def test_wrong_sizes_and_options_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_features must be 45 or None for 'taylor'.*got 44"):
        feature_map("taylor", 8, 44)
    with pytest.raises(ValueError, match="head_dim must be at least 1, got 0"):
        feature_map("elu", 0)
    with pytest.raises(ValueError, match="num_features must be at least 1, got 0"):
        feature_map("favor", 8, 0)
    with pytest.raises(ValueError, match="num_features must be even for 'hedgehog', got 5"):
        feature_map("hedgehog", 8, 5)
    with pytest.raises(ValueError, match="max_norm must be positive or None, got 0"):
        feature_map("favor", 8, max_norm=0)
    with pytest.raises(ValueError, match=r"last axis of head_dim=8, got shape \(3, 7\)"):
        feature_map("elu", 8)(torch.zeros(3, 7))
    with pytest.raises(ValueError, match=r"x must be \[..., 4, 8\]"):
        feature_map("hedgehog", 8, num_heads=4)(torch.zeros(3, 8))
    with pytest.raises(TypeError, match="feature map 'relu' does not take these options"):
        feature_map("relu", 8, orthogonal=True)
