"""Entity probes: names in a text, turned into the indicator e of the router (eq. routing)."""

from vort.layers.entity_probe.indicator import encode_with_entities, entity_indicator
from vort.layers.entity_probe.probes import EntityProbe, LinearProbe, RuleProbe, SpacyProbe

__all__ = [
    "EntityProbe",
    "LinearProbe",
    "RuleProbe",
    "SpacyProbe",
    "encode_with_entities",
    "entity_indicator",
]
