"""Feature maps by name, for configurations."""

from typing import Any

from .base import FeatureMap
from .favor import FavorFeatures
from .hedgehog import HedgehogFeatures
from .pointwise import EluFeatures, IdentityFeatures, ReluFeatures
from .taylor import TaylorFeatures

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
    if name not in FEATURE_MAPS:
        raise ValueError(f"name must be one of {', '.join(FEATURE_MAPS)}, got {name!r}")
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
