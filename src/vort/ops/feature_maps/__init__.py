"""Feature maps φ whose inner product φ(q)·φ(k) stands for a similarity of q and k.

Retrieval (eq. keyed-retrieval of the paper) reads its memory through such a map. The functions
here are pure; maps that carry a random draw or parameters are `FeatureMap` modules, since a draw
must be saved with the model and parameters must be trained, and every map has a module form so
that a layer can treat them all alike.
"""

from .base import FeatureMap
from .factory import FEATURE_MAPS, feature_map
from .favor import FavorFeatures, draw_projection, favor_features
from .hedgehog import HedgehogFeatures, hedgehog_features
from .pointwise import (
    EluFeatures,
    IdentityFeatures,
    ReluFeatures,
    elu_features,
    relu_features,
)
from .taylor import TaylorFeatures, taylor_features

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
