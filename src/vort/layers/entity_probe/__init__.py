"""Entity probes: names in a text, turned into the indicator e of the router (eq. routing)."""

from vort.layers.entity_probe.indicator import encode_with_entities, entity_indicator
from vort.layers.entity_probe.linear_probe import LinearProbe
from vort.layers.entity_probe.protocol import EntityProbe
from vort.layers.entity_probe.rule_probe import RuleProbe
from vort.layers.entity_probe.spacy_probe import SpacyProbe

__all__ = [
    "EntityProbe",
    "LinearProbe",
    "RuleProbe",
    "SpacyProbe",
    "encode_with_entities",
    "entity_indicator",
]
