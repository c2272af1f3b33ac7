"""What the probes find, how fast, and what the shipped weights say of themselves."""

import json
import time
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vort.layers.entity_probe import EntityProbe, LinearProbe, RuleProbe, SpacyProbe

PASSAGE = (
    "It was a dull morning when old Mr. Pemberton left Bristol for the north. Rain fell. "
    '"Have you seen Harriet?" asked the captain. Harriet had gone to Lady Ashworth\'s house, '
    "near Calais. The captain bowed. Then he walked to New York."
)
PROBES: list[EntityProbe] = [
    RuleProbe(),
    RuleProbe(causal=True),
    LinearProbe.pretrained(),
    LinearProbe.pretrained(causal=True),
]


def names(probe: EntityProbe, text: str) -> list[str]:
    return [text[start:end] for start, end in probe.probe(text)]


@pytest.mark.parametrize("probe", [RuleProbe(), LinearProbe.pretrained()])
def test_names_of_a_passage_are_found_and_joined(probe: EntityProbe) -> None:
    assert names(probe, PASSAGE) == [
        "Mr. Pemberton",
        "Bristol",
        "Harriet",
        "Harriet",
        "Lady Ashworth",
        "Calais",
        "New York",
    ]


def test_hyphens_and_apostrophes_stay_inside_a_name_and_possessives_do_not() -> None:
    text = "from Saint-Malo came O'Brien's letter, and the Brontës' too"
    assert names(RuleProbe(), text) == ["Saint-Malo", "O'Brien", "Brontës"]


@pytest.mark.parametrize("probe", PROBES)
@given(text=st.text(max_size=80))
def test_spans_are_ordered_inside_the_text_and_never_empty(probe: EntityProbe, text: str) -> None:
    spans = probe.probe(text)
    bounds = [bound for span in spans for bound in span]
    assert bounds == sorted(bounds)
    assert all(0 <= start < end <= len(text) for start, end in spans)


@pytest.mark.parametrize("probe", PROBES)
def test_text_without_capitals_has_no_names(probe: EntityProbe) -> None:
    assert probe.probe("all quiet, 7 times. and so on\n") == []
    assert probe.probe("") == []


@pytest.mark.parametrize("probe", PROBES)
def test_probing_reads_at_least_100000_characters_a_second(probe: EntityProbe) -> None:
    text = PASSAGE * 600
    probe.probe(PASSAGE)
    start = time.process_time()
    probe.probe(text)
    assert len(text) / (time.process_time() - start) > 100_000


def test_the_shipped_file_is_small_and_says_where_it_comes_from() -> None:
    file = resources.files("vort.layers.entity_probe") / "linear_probe.safetensors"
    assert len(file.read_bytes()) < 250_000
    about = LinearProbe.pretrained().metadata
    assert about["command"].startswith("python tools/train_entity_probe.py train --data")
    assert about["seed"] == 0
    assert {name: len(part) for name, part in about["split"].items()} == {
        "train": 65,
        "validation": 15,
        "test": 20,
    }
    assert about["test_f1"]["full"] >= 0.80
    assert about["test_f1"]["causal"] >= 0.80


def test_a_file_of_another_kind_or_damaged_is_refused(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    other = tmp_path / "other.safetensors"
    save_file({"full": np.zeros(4)}, str(other))
    with pytest.raises(ValueError, match=r"not a probe of this version.*got None"):
        LinearProbe.load(other)
    source = resources.files("vort.layers.entity_probe") / "linear_probe.safetensors"
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(source.read_bytes()[:5000])
    with pytest.raises(ValueError, match="damaged"):
        LinearProbe.load(damaged)


def test_spacy_entities_with_the_wanted_labels_are_passed_on() -> None:
    def pipeline(text: str) -> Any:
        entity = SimpleNamespace(start_char=5, end_char=9, label_="PERSON")
        return SimpleNamespace(
            ents=[entity, SimpleNamespace(start_char=10, end_char=14, label_="DATE")]
        )

    assert names(SpacyProbe(pipeline), "then Mary sang") == ["Mary"]
    assert names(SpacyProbe(pipeline, labels={"DATE"}), "then Mary sang") == ["sang"]


def test_a_missing_spacy_is_reported_with_the_way_out() -> None:
    try:
        import spacy  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match="pip install spacy"):
            SpacyProbe("en_core_web_sm")
    else:
        pytest.skip("spaCy is installed here")


def test_metadata_is_plain_json() -> None:
    assert json.loads(json.dumps(LinearProbe.pretrained().metadata))
