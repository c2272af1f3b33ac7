"""Feature maps φ whose inner product φ(q)·φ(k) stands for a similarity of q and k.

Retrieval (eq. keyed-retrieval of the paper) reads its memory through such a map. The functions
here are pure; maps that carry a random draw or parameters are `FeatureMap` modules, since a draw
must be saved with the model and parameters must be trained, and every map has a module form so
that a layer can treat them all alike.
"""

from typing import Any

from vort.names import check_choice

from .base import FeatureMap
from .favor import FavorFeatures, draw_projection, favor_features
from .fixed import (
    EluFeatures,
    IdentityFeatures,
    ReluFeatures,
    TaylorFeatures,
    elu_features,
    relu_features,
    taylor_features,
)
from .hedgehog import HedgehogFeatures, hedgehog_features

__all__ = [
    "FEATURE_MAPS",
    "EluFeatures",
    "FavorFeatures",
    "FeatureMap",
    "HedgehogFeatures",
    "IdentityFeatures",
    "ReluFeatures",
    "TaylorFeatures",
    "draw_projection",
    "elu_features",
    "favor_features",
    "feature_map",
    "hedgehog_features",
    "relu_features",
    "taylor_features",
]

FEATURE_MAPS: dict[str, type[FeatureMap]] = {
    "favor": FavorFeatures,
    "elu": EluFeatures,
    "relu": ReluFeatures,
    "hedgehog": HedgehogFeatures,
    "taylor": TaylorFeatures,
    "identity": IdentityFeatures,
}
_SIZED = (FavorFeatures, HedgehogFeatures)


def feature_map(
    name: str, head_dim: int, num_features: int | None = None, **options: Any
) -> FeatureMap:
    """Return the map called `name` for heads of size `head_dim`.

    Args:
        name: one of `FEATURE_MAPS`: favor, elu, relu, hedgehog, taylor, identity.
        head_dim: size of the last axis of queries and keys.
        num_features: output dimension, free for favor and hedgehog; for the others it may be left
            out or must be the dimension the map has.
        **options: further arguments of that map, such as `generator` for favor.

    Example:
        >>> feature_map("taylor", head_dim=16).output_dim
        153
    """
    check_choice("name", name, FEATURE_MAPS)
    kind = FEATURE_MAPS[name]
    try:
        if issubclass(kind, _SIZED):
            return kind(head_dim, num_features, **options)
        made = kind(head_dim, **options)
    except TypeError as error:
        raise TypeError(f"feature map {name!r} does not take these options: {error}") from error
    if num_features is not None and num_features != made.output_dim:
        raise ValueError(
            f"num_features must be {made.output_dim} or None for {name!r} with "
            f"head_dim={head_dim}, got {num_features}"
        )
    return made
